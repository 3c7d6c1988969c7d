"""The catalogue of causes that can be named: what happened, how it comes about, what would refute it, and what to do.

The slugs are public. Each entry is also a page (`holter explain nonfinite_input`), so it is written to be read by somebody who was
just woken, without the code at hand. A file is a family.
"""

from holter.diagnosis.causes import (
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
from holter.diagnosis.causes.entry import CauseEntry

ALL: tuple[CauseEntry, ...] = (
    *numbers.CAUSES,
    *replicas.CAUSES,
    *frozen.CAUSES,
    *learning.CAUSES,
    *precision.CAUSES,
    *data.CAUSES,
    *model.CAUSES,
    *scripted.CAUSES,
    *collectives.CAUSES,
    *processes.CAUSES,
    *slowness.CAUSES,
)

BY_NAME = {entry.cause: entry for entry in ALL}

__all__ = ["ALL", "BY_NAME", "CauseEntry"]
