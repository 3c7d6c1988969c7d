"""The catalogue of causes that can be named: what happened, how it comes about, what would refute it, and what to do.

The slugs are public. Each entry is also a page (`holter explain nonfinite_input`), so it is written to be read by somebody who was
just woken, without the code at hand. A file is a family.
"""

from holter.faults.cause import CauseEntry
from holter.faults.data.causes import CAUSES as DATA
from holter.faults.frozen.causes import CAUSES as FROZEN
from holter.faults.hangs.causes import CAUSES as HANGS
from holter.faults.hangs.collective_causes import CAUSES as COLLECTIVES
from holter.faults.learning.causes import CAUSES as LEARNING
from holter.faults.logged.causes import CAUSES as LOGGED
from holter.faults.model.causes import CAUSES as MODEL
from holter.faults.numerics.causes import CAUSES as NUMERICS
from holter.faults.precision.causes import CAUSES as PRECISION
from holter.faults.replicas.causes import CAUSES as REPLICAS
from holter.faults.slowness.causes import CAUSES as SLOWNESS

ALL: tuple[CauseEntry, ...] = (
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

BY_NAME = {entry.cause: entry for entry in ALL}

__all__ = ["ALL", "BY_NAME", "CauseEntry"]
