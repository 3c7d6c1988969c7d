"""What only the script knows."""

from holter.diagnosis.rows.row import Row

ROWS: tuple[Row, ...] = ()
