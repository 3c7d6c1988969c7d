"""What the dtypes did."""

from holter.diagnosis.rows.row import Row

ROWS: tuple[Row, ...] = ()
