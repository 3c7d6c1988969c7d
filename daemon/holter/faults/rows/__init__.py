"""The differential, line by line, a file a family.

Read a line as: this cause, from this detector, so sure, on this basis, if these were seen, those looked for in vain, these not looked
for, unless those.
"""

from holter.faults.data.rows import ROWS as DATA
from holter.faults.frozen.rows import ROWS as FROZEN
from holter.faults.hangs.collective_rows import ROWS as COLLECTIVES
from holter.faults.hangs.rows import ROWS as HANGS
from holter.faults.learning.rows import ROWS as LEARNING
from holter.faults.logged.rows import ROWS as LOGGED
from holter.faults.model.rows import ROWS as MODEL
from holter.faults.numerics.rows import ROWS as NUMERICS
from holter.faults.precision.rows import ROWS as PRECISION
from holter.faults.replicas.rows import ROWS as REPLICAS
from holter.faults.row import Row
from holter.faults.slowness.rows import ROWS as SLOWNESS

ALL: tuple[Row, ...] = (
    *NUMERICS,
    *REPLICAS,
    *FROZEN,
    *LEARNING,
    *PRECISION,
    *DATA,
    *MODEL,
    *LOGGED,
    *COLLECTIVES,
    *HANGS,
    *SLOWNESS,
)

__all__ = ["ALL", "Row"]
