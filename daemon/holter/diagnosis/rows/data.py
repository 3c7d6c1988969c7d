"""What the ranks are fed."""

from holter.diagnosis.rows.row import Row

ROWS: tuple[Row, ...] = ()
