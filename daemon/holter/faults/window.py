"""What a detector looks at: the ranks' observations, assembled, as of one moment.

A window is frozen and holds no per-rank record of a healthy step: only what was found to differ (roots grouped by value, the
sparse list of non-finite tensors), the spread of each number over the ranks, and rare messages. So the cost of judging
grows with what is wrong, not with ranks x tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from holter.records import Census, Exam, ExamDepth, Exited, Nonfinite, Origin, Overdue, Rare, Table
from holter.records.rank import OWN

T = TypeVar("T", bound=Rare)

TableKey = tuple[str, int, int]
"""(tensor class, step, rank)"""


def class_along(name: str) -> str:
    """Return the name of a class as one rank reported it, without its subgroup.

    >>> class_along("gradients@replicate#3")
    'gradients@replicate'
    """
    return name.partition("#")[0]


OWN_START = f"parameters_before@{OWN}"
"""Class of the tensors that, before the first step, should differ from those of every other rank."""


def is_own(name: str) -> bool:
    """Whether a class belongs to one rank alone, and is compared only with that rank's own history."""
    return name.partition("@")[2].startswith(OWN)


@dataclass(frozen=True, order=True)
class ExamKey:
    """Identifies one examination that is asked for."""

    asked_ns: int
    depth: ExamDepth
    rank: int


@dataclass(frozen=True)
class Spread:
    """One number of one step over all ranks."""

    mean: float
    """Mean over the ranks whose number was finite; NaN if none was."""
    low: float
    high: float
    low_rank: int
    high_rank: int
    num: int
    """Number of ranks that reported it."""
    num_nonfinite: int = 0


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step: small, so that far more steps are remembered than in `Window.steps`."""

    step: int
    at_ns: int
    """When the first rank's report of this step reached the coordinator."""
    numbers: Mapping[str, Spread]
    """`loss`, `gradient_norm`, `learning_rate`, `micro_steps`, `seconds`, and the names of `records.NUMBERS`."""


@dataclass(frozen=True)
class Note:
    """One rare message of a rank, and when it came."""

    rank: int
    step: int
    at_ns: int
    body: Rare


@dataclass(frozen=True)
class CensusChange:
    """A tensor that differs from the same rank's census before."""

    rank: int
    step: int
    name: str
    what: str
    """`dtype`, `requires_grad`, `shape`, `gone`, `new`"""
    before: str
    after: str


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
    """Tensor class -> root fingerprint -> ranks that have it. More than one root: replicas differ. On a mesh, the scope follows the class
    name: `gradients@replicate#1` is the subgroup along `replicate` whose lowest rank is 1. Step 0 has `OWN_START`, too."""
    nonfinite: tuple[tuple[int, Nonfinite], ...] = ()
    """(rank, tensor) for every tensor that held NaN or Inf and was applied to the weights."""
    broke_history: tuple[int, ...] = ()
    """Ranks whose parameters before this step were not what the step before left."""
    kept_history: tuple[int, ...] = ()
    """Ranks whose parameters before this step were compared and were what the step before left."""
    batches: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Signature of the step's batches -> ranks that were fed them; ranks without a signature are not listed."""


@dataclass(frozen=True)
class ClassHistory:
    """When ranks agreed on a class of tensors and when not, since the start of the run."""

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
class Delay:
    """A rank that does not move on, as its sidecar last reported."""

    step: int
    at_ns: int
    """When that report reached the coordinator."""
    overdue: Overdue

    @property
    def moved_ns(self) -> int:
        """When the rank last moved on."""
        return self.at_ns - round(self.overdue.waited_s * 1e9)

    def waited_s(self, now_ns: int) -> float:
        """Seconds since the rank last moved on."""
        return self.overdue.waited_s + (now_ns - self.at_ns) / 1e9


@dataclass(frozen=True)
class Examined:
    """What an examination of a rank showed."""

    step: int
    at_ns: int
    """When it reached the coordinator."""
    exam: Exam
    observed_ns: int = 0
    """When it was made, by the clock of the rank's own host; 0 if unknown."""


@dataclass(frozen=True)
class LinkView:
    """The state of the connection to a rank's sidecar."""

    state: str
    """`connected`, `closed` or `silent`."""
    since_ns: int


@dataclass(frozen=True)
class Arrival:
    """A rank that came late to a collective."""

    rank: int
    lag_s: float
    """Seconds behind the median of the other ranks, at that collective of the step to which it came latest."""
    group: str
    sequence: int
    data_s: float
    """Seconds that it spent in its data loader in this step."""
    others_data_s: float
    """Seconds that the other ranks spent in theirs, median."""
    pressure: float = 0.0
    """Pressure on the processors of its host, 0 to 1."""


@dataclass(frozen=True)
class StepArrivals:
    """When the ranks came to the collectives of one step."""

    step: int
    at_ns: int
    num_ranks: int
    num_calls: int
    latest: tuple[Arrival, ...]
    """The few latest ranks, the latest first."""
    spread_s: float
    """Median distance in seconds of the other ranks from their median, which is the usual spread."""
    error_s: float
    """Uncertainty in seconds of the hosts' clocks against each other."""
    usual_s: float = 0.0
    """Seconds by which each other rank was late at its own worst collective, median: with many collectives, everyone is
    late somewhere."""


@dataclass(frozen=True)
class CallCounts:
    """How many collectives of a group each rank had called by the end of a step."""

    step: int
    lasts: Mapping[int, tuple[int, ...]]
    """Number of the last call -> ranks; if many ranks agree, only some of them."""


@dataclass(frozen=True)
class PartedBlock:
    """A run of collectives of one group in which ranks did not make the same calls."""

    group: str
    block: int
    at_ns: int
    digests: Mapping[int, tuple[int, ...]]
    """Digest of the calls -> ranks that have it."""


@dataclass(frozen=True)
class ProcessView:
    """The ranks' processes: how they ended, which stand still, what examinations of them showed."""

    exits: tuple[RankExit, ...] = ()
    """Ordered by time."""
    signalled: Mapping[int, int] = field(default_factory=dict)
    """Rank -> when it reported a signal that asks it to end, by the coordinator's clock."""
    failing: Mapping[int, int] = field(default_factory=dict)
    """Rank -> when it reported an exception that is about to end it."""
    delays: Mapping[int, Delay] = field(default_factory=dict)
    """Rank -> its delay; ranks that move on are not listed."""
    exams: Mapping[int, tuple[Examined, ...]] = field(default_factory=dict)
    """Rank -> its newest examinations, oldest first; bounded."""
    unexamined: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the newest `asked_ns` that was not answered in time."""
    links: Mapping[int, LinkView] = field(default_factory=dict)
    """Rank -> connection to its sidecar."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """Rank -> host name."""


@dataclass(frozen=True)
class TensorView:
    """Which tensors agreed across the ranks, and the tables that were asked for because they did not."""

    classes: Mapping[str, ClassHistory] = field(default_factory=dict)
    """Class of tensors -> when the ranks agreed on it; along an axis of a mesh (`gradients@replicate`), when every
    subgroup did."""
    tables: Mapping[TableKey, Table] = field(default_factory=dict)
    unavailable: frozenset[TableKey] = frozenset()
    """Tables that were asked for and cannot be had: too old, or the sidecar is gone."""
    origins: Mapping[tuple[int, int], Origin] = field(default_factory=dict)
    """(rank, step) -> where the replay found the first NaN."""


@dataclass(frozen=True)
class ModelView:
    """The structure of the ranks' models."""

    census: Mapping[int, Census] = field(default_factory=dict)
    """Rank -> its census, parts joined; equal censuses are one object."""
    census_steps: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the step at which it reported that census."""
    changes: tuple[CensusChange, ...] = ()
    """Ordered by step and rank; bounded."""


@dataclass(frozen=True)
class CallView:
    """The collectives that the ranks called: when they came, whether they called the same, and how many."""

    arrivals: tuple[StepArrivals, ...] = ()
    """Ascending by step; bounded, the oldest are forgotten first."""
    parted: tuple[PartedBlock, ...] = ()
    """Oldest first; bounded."""
    counts: Mapping[str, tuple[CallCounts, ...]] = field(default_factory=dict)
    """Group -> its steps, ascending; bounded, the oldest are forgotten first."""


@dataclass(frozen=True)
class Window:
    """Everything that a detector may look at."""

    now_ns: int
    world_size: int
    attached: frozenset[int]
    steps: tuple[StepView, ...] = ()
    """Ascending; bounded, the oldest are forgotten first."""
    series: tuple[StepNumbers, ...] = ()
    """Ascending; complete steps only, so that a mean is over all ranks; bounded, the oldest are forgotten first."""
    notes: tuple[Note, ...] = ()
    """Ordered by step, rank and the rank's own order; bounded for each kind."""
    tensors: TensorView = field(default_factory=TensorView)
    models: ModelView = field(default_factory=ModelView)
    processes: ProcessView = field(default_factory=ProcessView)
    calls: CallView = field(default_factory=CallView)
    real_ns: int = 0
    """The real time, 0 if that is `now_ns`: the last judgement sets `now_ns` ahead so that no report is waited for;
    waits count to this time."""
    _values: dict[str, list[tuple[int, Spread]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of `values`, because many detectors ask for the same numbers."""

    def step(self, step: int) -> StepView | None:
        """Return the view of one step; None if it is not remembered."""
        return next((view for view in reversed(self.steps) if view.step == step), None)

    def notes_of(self, kind: type[T]) -> Iterator[tuple[Note, T]]:
        """Yield the messages of one kind, in order of arrival."""
        for note in self.notes:
            if isinstance(note.body, kind):
                yield note, note.body

    def values(self, name: str) -> list[tuple[int, Spread]]:
        """Return one number over time, as (step, spread over the ranks), for the steps that have it."""
        known = self._values.get(name)
        if known is None:
            known = self._values[name] = [
                (entry.step, entry.numbers[name]) for entry in self.series if name in entry.numbers
            ]
        return known.copy()
