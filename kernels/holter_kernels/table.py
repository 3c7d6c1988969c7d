"""The result of a pass: a row for each tensor, and a numpy array for each statistic."""

from collections.abc import Iterator

import numpy as np

from holter_kernels.layout import ROW

_COLUMNS = tuple(name for name in ROW.names or () if name != "reserved")


class Table:
    """Statistics of a list of tensors, in its order.

    Counts (`numel`, `zeros`, `subnormals`, `nans`, `pos_infs`, `neg_infs`, `low_mantissa_zero`) and `fingerprint` are uint64 arrays;
    `min`, `max`, `absmax`, `absmin_nonzero`, `sum`, `abs_sum`, `square_sum` float64 arrays over the finite values;
    `histogram` is an array of n rows of 256 uint64 counts, or None if it was off. `reference.py` defines each.

    An empty tensor, and one that has lost its memory since the pass was made, has numel 0 and fingerprint 0. Where there is no
    finite value, min, max and absmax are NaN and the sums 0; where there is no finite value but zero, absmin_nonzero is
    NaN. After a pass without statistics only numel and fingerprint mean anything; the other columns are 0. The same holds for a tensor of a dtype
    that nothing here knows (float8 fnuz, e8m0, unsigned integers): its bits are read, its other counts are 0, min to square_sum NaN.
    """

    __slots__ = ("histogram", "left_out", "rows", *_COLUMNS)

    def __init__(self, rows: np.ndarray, histogram: np.ndarray | None, left_out: int = 0) -> None:
        self.rows = rows
        """All columns, in the form of `layout.ROW`."""
        self.histogram = histogram
        self.left_out = left_out
        """Number of tensors that could not be read; each has the row of an empty one."""

    def __getattr__(self, name: str) -> np.ndarray:
        """Return a column, made when it is first used: most readings need only three or four."""
        if name not in _COLUMNS:
            raise AttributeError(name)
        column: np.ndarray = self.rows[name]
        setattr(self, name, column)
        return column

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[np.void]:
        """Iterate over the rows as numpy records: `row["nans"]`."""
        return iter(self.rows)

    def __repr__(self) -> str:
        return f"Table({len(self)} tensors, {int(self.rows['numel'].sum())} elements)"
