"""Why a component that should not move does, or was never right."""

from holter.diagnosis.rows.row import Row

ROWS: tuple[Row, ...] = ()
