"""What the model itself says."""

from holter.diagnosis.rows.row import Row

ROWS: tuple[Row, ...] = ()
