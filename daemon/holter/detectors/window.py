"""What a detector looks at: the ranks' observations, assembled, as of one moment.

A window is frozen and holds no per-rank record of a healthy step, only what was found to differ: roots grouped by value, the sparse
list of non-finite tensors. So judging costs what is wrong, not ranks x tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from holter.records import Census, Exited, Nonfinite, Origin, Table

TableKey = tuple[str, int, int]
"""(tensor class, step, rank)"""


@dataclass(frozen=True)
class StepView:
    """One step across all ranks, as far as it was reported."""

    step: int
    first_seen_ns: int
    """When the first rank's report of this step reached the coordinator, by the coordinator's clock."""
    num_reported: int
    missing: tuple[int, ...]
    """Attached ranks that are alive and have not reported this step: named, never waited for."""
    roots: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    """Tensor class -> root fingerprint -> ranks that have it. More than one root: replicas differ."""
    nonfinite: tuple[tuple[int, Nonfinite], ...] = ()
    """(rank, tensor) for every tensor that held NaN or Inf and was applied to the weights."""
    broke_history: tuple[int, ...] = ()
    """Ranks whose parameters before this step were not what the step before left."""
    kept_history: tuple[int, ...] = ()
    """Ranks whose parameters before this step were looked at and were what the step before left."""


@dataclass(frozen=True)
class ClassHistory:
    """Since the start of the run: when ranks agreed on a class of tensors, and when not."""

    first_step: int
    is_equal_at_first: bool
    last_equal_step: int | None
    """The last step at which all ranks agreed before they first differed; if they never differed, the last one compared."""
    first_unequal_step: int | None
    num_equal: int
    num_unequal: int


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended, and when."""

    rank: int
    at_ns: int
    exited: Exited


@dataclass(frozen=True)
class Window:
    """Everything a detector may look at."""

    now_ns: int
    world_size: int
    attached: frozenset[int]
    steps: tuple[StepView, ...] = ()
    """Ascending; bounded, oldest first forgotten."""
    classes: Mapping[str, ClassHistory] = field(default_factory=dict)
    tables: Mapping[TableKey, Table] = field(default_factory=dict)
    unavailable: frozenset[TableKey] = frozenset()
    """Tables that were asked for and cannot be had: too old, or the sidecar is gone."""
    origins: Mapping[tuple[int, int], Origin] = field(default_factory=dict)
    """(rank, step) -> where the replay found the first NaN."""
    exits: tuple[RankExit, ...] = ()
    """In order of time."""
    census: Mapping[int, Census] = field(default_factory=dict)
    """Rank -> its first model's census, parts joined."""

    def step(self, step: int) -> StepView | None:
        """The view of one step, if it is still remembered."""
        return next((view for view in reversed(self.steps) if view.step == step), None)
