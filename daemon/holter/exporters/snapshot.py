"""The state that a scrape renders, frozen: one record a rank, one for the coordinator."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from holter.records import Phase, Severity, StepDone, Where

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
    """One rank, as last heard of. None: not known, and then not exported."""

    rank: int
    hostname: str
    gpu_uuid: str = ""
    step: int | None = None
    last_progress_s: float | None = None
    """Seconds since the epoch when it last completed a step or changed phase."""
    phase: Phase | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    overhead_ratio: float | None = None
    nonfinite: Mapping[Where, int] = field(default_factory=dict)
    """Tensors that held NaN or Inf so far, by where they were met."""
    dropped: int = 0
    is_sidecar_up: bool = True
    steps: StepHistogram = field(default_factory=StepHistogram)


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
    incidents: Mapping[str, int] = field(default_factory=dict)
    """Cause -> incidents since the start."""


def add_nonfinite(counts: Mapping[Where, int], step: StepDone) -> Mapping[Where, int]:
    """The counts after one more step; the same mapping when the step was healthy."""
    if not step.nonfinite:
        return counts
    added = dict(counts)
    for tensor in step.nonfinite:
        added[tensor.where] = added.get(tensor.where, 0) + 1
    return added
