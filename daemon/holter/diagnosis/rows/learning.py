"""Why nothing, or the wrong thing, is learning."""

from holter.diagnosis.rows.row import Row

ROWS: tuple[Row, ...] = ()
