"""Importance ratio: the policy that is trained and the one that sampled disagree before anything was updated.

What it detects
    Importance ratios far from one on the first micro-step of the run, when both policies have the same weights, and at every first
    micro-step after an update since.

Why it matters
    Ratios correct for the distance between two policies. If the engine that samples computes other probabilities for the same weights
    (precision, temperature, another template, a stale copy), each update corrects for a distance that is not there.

False positives
    With several updates for each rollout the ratios leave one on purpose: they are reported only if they were off before the first update
    and have never been near one since. Half precision alone moves single ratios by some percent: less than a fifth is not judged.

What to do
    Compare log-probabilities of one sample token by token from both engines (`holter explain train_inference_mismatch`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.robust import finite
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

DEVIATION = "ratio.first_deviation"


@dataclass(frozen=True)
class ImportanceRatio:
    """Judges ratios where they should be one."""

    name: ClassVar[str] = "importance_ratio"

    min_deviation: float = threshold(0.2, above=0)
    """Largest distance from one that precision explains."""
    min_logs: int = 8
    """Logs, from the first on, that must all be off."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """At most one finding; silent where the run's first step is not remembered."""
        points = finite(window.values(DEVIATION))
        is_from_start = bool(points) and points[0][0] <= 1
        if not is_from_start or len(points) < self.min_logs or min(value for _, value in points) < self.min_deviation:
            return
        yield Finding(
            detector=self.name,
            severity="warning",
            first_step=0,
            detected_step=points[self.min_logs - 1][0],
            ranks=tuple(sorted(window.attached)),
            summary=f"Importance ratios were off one by up to {points[0][1]:.3g} before the first update, and at every log since.",
            facts={"is_off_at_first": True, "is_ever_one": False, "series": [DEVIATION]},
            evidence=(
                Evidence(
                    kind="series",
                    summary=f"largest distance of a ratio from one on the first micro-step: {points[0][1]:.3g} at step 0, never under {min(value for _, value in points):.3g}",
                    values={"first": points[0][1], "num_logs": len(points)},
                ),
            ),
        )
