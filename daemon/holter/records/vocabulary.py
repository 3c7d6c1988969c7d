"""Words that many records share."""

import enum
from typing import Literal

import msgspec

Severity = Literal["critical", "warning", "info"]
Basis = Literal["observation", "documented", "inference"]
Action = Literal["observe", "notify", "halt"]
Where = Literal["input", "loss", "gradient", "reduced_gradient"]
"""In which kind of tensor a value was met. `gradient` is the rank's own, from before any reduction."""
View = Literal["local", "replicated", "sharded"]
"""Where a statistic was taken: the rank's own before any reduction, reduced and equal on all replicas, reduced and cut into shards."""


class Phase(enum.IntEnum):
    """What a rank's main thread is doing, as far as its hooks tell."""

    ATTACH = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    CHECKPOINT = 5
    EVALUATION = 6
    OTHER = 7
    """Between two hooks: the script's own code."""


class Mark(enum.IntFlag):
    """What is odd about one tensor's values."""

    CONSTANT = 1
    """More than one element, all equal."""
    ZERO = 2
    """All elements are zero."""
    NONFINITE = 4
    ROUNDED = 8
    """Not constant, float32 or float64, and the low mantissa bits of (nearly) all values are zero: it passed through a narrower dtype."""
    HUGE = 16
    """A magnitude above 1e6, or as many subnormal values as only uninitialised memory has."""


class Named(msgspec.Struct, frozen=True, array_like=True):
    """Some tensors or modules by name: all are counted, the first few named."""

    count: int = 0
    names: list[str] = []


ExamDepth = Literal["quick", "native"]
"""`quick`: the process, the recorder, Python stacks. `native`: stacks through native code as well, a second more."""
