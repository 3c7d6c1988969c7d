"""The state that a scrape renders, frozen: one record a rank, one for the coordinator."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holter.records import Device, Phase, Severity, StepDone, Where
from holter.records.goodput import Goodput

if TYPE_CHECKING:
    # A sidecar exports too, and must be up before its rank can die: it must not wait until fifty detectors are imported.
    from holter.faults.window import Spread

STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the step time histogram: a step lasts from milliseconds (a test) to minutes (a large model)."""


@dataclass(frozen=True)
class StepHistogram:
    """Step times since the start, by bucket."""

    counts: tuple[int, ...] = (0,) * (len(STEP_BUCKETS_S) + 1)
    """Steps in each bucket, not cumulated; the last one is above every bound."""
    total_s: float = 0.0

    def add(self, seconds: float) -> "StepHistogram":
        """One more step."""
        index = bisect_left(STEP_BUCKETS_S, seconds)
        counts = (*self.counts[:index], self.counts[index] + 1, *self.counts[index + 1 :])
        return StepHistogram(counts, self.total_s + seconds)


@dataclass(frozen=True)
class RankSnapshot:
    """One rank, as last heard of. What is None is not known and not exported."""

    rank: int
    hostname: str
    gpu_uuid: str = ""
    step: int | None = None
    last_progress_s: float | None = None
    """Seconds since the epoch when it last completed a step or changed phase."""
    phase: Phase | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    lag_s: float | None = None
    """How far it was behind the median of the others at the collectives of the last compared step; 0 unless it was among the latest ranks."""
    overhead_ratio: float | None = None
    nonfinite: Mapping[Where, int] = field(default_factory=dict)
    """Tensors that held NaN or Inf so far, by where they were met."""
    dropped: int = 0
    is_sidecar_up: bool = True
    steps: StepHistogram = field(default_factory=StepHistogram)
    device: Device | None = None
    """As a thread of the sidecar last read it; a scrape opens no driver."""
    is_coordinator_there: bool | None = None
    is_unwatched: bool | None = None
    """Whether the sidecar hears the coordinator; None in the coordinator's own export."""


@dataclass(frozen=True)
class IncidentInfo:
    """An open incident in words that fit into labels; a field is empty where there is nothing to name."""

    incident: str
    cause: str
    severity: Severity
    ranks: str
    """`1`, or the first few `and 15,990 more`."""
    tensors: str
    """Tensors, else modules."""
    collective: str
    """`all_reduce #31 of default_pg`"""
    step: str
    url: str
    """Where the diagnosis can be read."""


@dataclass(frozen=True)
class ModuleFigures:
    """One module when it was last read: the largest value over the ranks that read it, NaN where none did."""

    module: str
    gradient_norm: float
    weight_norm: float
    update_ratio: float
    gradient_zeros: float


@dataclass(frozen=True)
class JobFigures:
    """The whole job in a few numbers, however many ranks it has."""

    world_size: int = 0
    step: int | None = None
    """Steps that every living rank has completed."""
    sidecars: Mapping[str, int] = field(default_factory=dict)
    """State of the sidecar -> ranks."""
    phases: Mapping[Phase, int] = field(default_factory=dict)
    """Phase -> ranks in it; ranks that ended are in none."""
    last_progress_s: float | None = None
    """When any living rank last moved, seconds since the epoch."""
    lag_s: float | None = None
    """Lag of the latest rank, at the last step that was compared."""
    dropped: int = 0
    overhead_ratio: float | None = None
    """On the living rank where holter takes most."""
    spreads: "Mapping[str, Spread]" = field(default_factory=dict)
    """`loss`, `gradient_norm`, `learning_rate`, `seconds`, `loss_scale`: the newest of each."""
    modules: tuple[ModuleFigures, ...] = ()
    exponents: tuple[float, ...] = ()
    """Share of gradient values in each bucket of exponents, the smallest first."""


@dataclass(frozen=True)
class CoordinatorSnapshot:
    """What only the coordinator knows."""

    detectors: tuple[str, ...] = ()
    """Every detector there is, so that its counters begin at 0."""
    detector_s: Mapping[str, float] = field(default_factory=dict)
    """How long each took when it last judged."""
    detector_failures: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[tuple[str, Severity], ...] = ()
    """(detector, severity) of what stands now."""
    open_incidents: tuple[tuple[str, Severity], ...] = ()
    """(cause, severity)"""
    opened_s: Mapping[Severity, float] = field(default_factory=dict)
    """Severity -> when the newest of those was opened, seconds since the epoch."""
    incidents: Mapping[str, int] = field(default_factory=dict)
    """Cause -> incidents since the start; every cause there is, so that its counter begins at 0."""
    infos: tuple[IncidentInfo, ...] = ()
    """Of the open incidents, the most urgent first."""
    halts: Mapping[str, int] = field(default_factory=dict)
    """Outcome -> halts since the start."""
    last_good_step: int | None = None
    """Completed steps in the newest checkpoint whose numbers are good."""
    num_blind_spots: int = 0
    """Sentences about what cannot be seen."""
    webhook: Mapping[str, int] = field(default_factory=dict)
    """Outcome -> messages to the webhook."""
    notifications: Mapping[str, int] = field(default_factory=dict)
    """Outcome -> messages to phones and chats."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Outcome -> requests to a collector of OpenTelemetry."""
    job: JobFigures = field(default_factory=JobFigures)
    goodput: Goodput | None = None


def add_nonfinite(counts: Mapping[Where, int], step: StepDone) -> Mapping[Where, int]:
    """The counts after one more step; the same mapping when the step was healthy."""
    if not step.nonfinite:
        return counts
    added = dict(counts)
    for tensor in step.nonfinite:
        added[tensor.where] = added.get(tensor.where, 0) + 1
    return added
