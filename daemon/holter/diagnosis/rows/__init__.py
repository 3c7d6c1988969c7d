"""The differential, line by line, a file a family.

Read a line as: this cause, from this detector, so sure, on this basis, if these were seen, those looked for in vain, these not looked
for, unless those.
"""

from holter.diagnosis.rows import (
    collectives,
    data,
    frozen,
    learning,
    model,
    numbers,
    precision,
    processes,
    replicas,
    scripted,
    slowness,
)
from holter.diagnosis.rows.row import Row

ALL: tuple[Row, ...] = (
    *numbers.ROWS,
    *replicas.ROWS,
    *frozen.ROWS,
    *learning.ROWS,
    *precision.ROWS,
    *data.ROWS,
    *model.ROWS,
    *scripted.ROWS,
    *collectives.ROWS,
    *processes.ROWS,
    *slowness.ROWS,
)

__all__ = ["ALL", "Row"]
