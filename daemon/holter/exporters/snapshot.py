"""The state that a scrape renders, as frozen records: one for each rank, and one for the coordinator."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holter.records import Device, Phase, Severity, StepDone, Where
from holter.records.goodput import Goodput

if TYPE_CHECKING:
    # A sidecar exports, too, and must be up before its rank can die: it must not wait until fifty detectors are
    # imported.
    from holter.faults.window import Spread

STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds in seconds of the step time histogram: a step takes from milliseconds (a test) to minutes (a large
model)."""


@dataclass(frozen=True)
class StepHistogram:
    """Step times since the start, in buckets."""

    counts: tuple[int, ...] = (0,) * (len(STEP_BUCKETS_S) + 1)
    """Number of steps in each bucket, not cumulated; the last bucket is above every bound."""
    total_s: float = 0.0

    def add(self, seconds: float) -> "StepHistogram":
        """Return the histogram with one more step."""
        index = bisect_left(STEP_BUCKETS_S, seconds)
        counts = (*self.counts[:index], self.counts[index] + 1, *self.counts[index + 1 :])
        return StepHistogram(counts, self.total_s + seconds)


@dataclass(frozen=True)
class RankSnapshot:
    """The last known state of one rank. A field that is None is not known and not exported."""

    rank: int
    hostname: str
    gpu_uuid: str = ""
    step: int | None = None
    last_progress_s: float | None = None
    """When it last completed a step or changed phase, in seconds since the epoch."""
    phase: Phase | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    lag_s: float | None = None
    """Lag in seconds behind the median of the others at the collectives of the last compared step; 0 unless it was
    among the latest ranks."""
    overhead_ratio: float | None = None
    nonfinite: Mapping[Where, int] = field(default_factory=dict)
    """Number of tensors that held NaN or Inf so far, by where they were found."""
    dropped: int = 0
    is_sidecar_up: bool = True
    steps: StepHistogram = field(default_factory=StepHistogram)
    device: Device | None = None
    """Readings of its device as the sidecar's thread last read them; a scrape opens no driver."""
    is_coordinator_there: bool | None = None
    is_unwatched: bool | None = None
    """`is_coordinator_there`: whether the sidecar hears the coordinator. `is_unwatched`: whether no coordinator has
    heard the sidecar for some time. Both are None in the coordinator's own export."""


@dataclass(frozen=True)
class IncidentInfo:
    """An open incident in strings that fit into labels; a field is empty if there is nothing to name."""

    incident: str
    cause: str
    severity: Severity
    ranks: str
    """The ranks to blame: `1`, or the first few `and 15,990 more`."""
    tensors: str
    """Names of tensors, or of modules if there are none."""
    collective: str
    """The collective: `all_reduce #31 of default_pg`."""
    step: str
    url: str
    """Address at which the diagnosis can be read."""


@dataclass(frozen=True)
class ModuleFigures:
    """Figures of one module when last read: the largest value over the ranks that read it, NaN if none did."""

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
    """Number of steps that every living rank has completed."""
    sidecars: Mapping[str, int] = field(default_factory=dict)
    """Number of ranks by the state of their sidecar."""
    phases: Mapping[Phase, int] = field(default_factory=dict)
    """Number of ranks in each phase; ranks that ended are in none."""
    last_progress_s: float | None = None
    """When any living rank last moved, in seconds since the epoch."""
    lag_s: float | None = None
    """Lag of the latest rank in seconds, at the last step that was compared."""
    dropped: int = 0
    overhead_ratio: float | None = None
    """Overhead on the living rank where holter takes most."""
    spreads: "Mapping[str, Spread]" = field(default_factory=dict)
    """The newest value of each of `loss`, `gradient_norm`, `learning_rate`, `seconds`, `loss_scale`."""
    modules: tuple[ModuleFigures, ...] = ()
    exponents: tuple[float, ...] = ()
    """Share of gradient values in each bucket of exponents, smallest first."""


@dataclass(frozen=True)
class CoordinatorSnapshot:
    """What only the coordinator knows."""

    detectors: tuple[str, ...] = ()
    """Names of all detectors, so that their counters begin at 0."""
    detector_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each detector took when it last judged."""
    detector_failures: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[tuple[str, Severity], ...] = ()
    """(detector, severity) of the findings that stand now."""
    open_incidents: tuple[tuple[str, Severity], ...] = ()
    """(cause, severity) of each open incident."""
    opened_s: Mapping[Severity, float] = field(default_factory=dict)
    """For each severity, when its newest open incident was opened, in seconds since the epoch."""
    incidents: Mapping[str, int] = field(default_factory=dict)
    """Number of incidents since the start by cause; every cause is present, so that its counter begins at 0."""
    infos: tuple[IncidentInfo, ...] = ()
    """Open incidents, most urgent first."""
    halts: Mapping[str, int] = field(default_factory=dict)
    """Number of halts since the start by outcome."""
    last_good_step: int | None = None
    """Completed steps in the newest checkpoint whose numbers are good; None if there is none."""
    num_blind_spots: int = 0
    """Number of sentences about what cannot be seen."""
    webhook: Mapping[str, int] = field(default_factory=dict)
    """Number of messages to the webhook by outcome."""
    notifications: Mapping[str, int] = field(default_factory=dict)
    """Number of messages to phones and chats by outcome."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Number of requests to an OpenTelemetry collector by outcome."""
    job: JobFigures = field(default_factory=JobFigures)
    goodput: Goodput | None = None


def add_nonfinite(counts: Mapping[Where, int], step: StepDone) -> Mapping[Where, int]:
    """Return the counts after one more step; the same mapping if the step was healthy."""
    if not step.nonfinite:
        return counts
    added = dict(counts)
    for tensor in step.nonfinite:
        added[tensor.where] = added.get(tensor.where, 0) + 1
    return added
