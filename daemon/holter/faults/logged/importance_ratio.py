"""Importance ratio: the policy that is trained and the one that sampled disagree before anything was updated.

What it detects
    Importance ratios far from one on the first micro-step of the run, when both policies have the same weights, and at every first
    micro-step after an update since; and ratios that were one at first and move away, log after log, without ever coming back.

Why it matters
    Ratios correct for the distance between two policies. If the engine that samples computes other probabilities for the same weights
    (precision, temperature, another template, a stale copy), each update corrects for a distance that is not there.

False positives
    With several updates for each rollout the ratios leave one on purpose: they are reported only if they were off before the first update
    and have never been near one since, or if they have gone much farther than a clip lets them. Half precision alone moves single ratios by
    some percent: less than a fifth for one, or a twentieth on average, is not judged.

What to do
    Compare log-probabilities of one sample token by token from both engines (`holter explain train_inference_mismatch`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from holter.faults.shared.robust import finite
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

DEVIATION, MEAN_DEVIATION = "ratio.first_deviation", "ratio.first_mean_deviation"


@dataclass(frozen=True)
class ImportanceRatio:
    """Judges ratios that should be one."""

    name: ClassVar[str] = "importance_ratio"

    min_deviation: float = threshold(0.2, above=0)
    """Largest distance of a single ratio from one that precision explains."""
    min_mean: float = threshold(0.05, above=0)
    """The same for their mean distance."""
    min_logs: int = 8
    """Number of logs, from the first on, that must all be off."""
    away: float = threshold(0.4, above=0)
    """Mean distance beyond what updates from one rollout cause: clipping keeps them within about a fifth."""
    away_logs: int = 16
    """Number of newest logs that must be this far away."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding; none if the run's first step is not remembered."""
        largest = dict(finite(window.values(DEVIATION)))
        points = [(step, mean, largest.get(step, mean)) for step, mean in finite(window.values(MEAN_DEVIATION))]
        if not points or points[0][0] > 1 or len(points) < self.min_logs:
            return
        if self._is_off_throughout(points):
            what = f"Importance ratios were off one by {points[0][1]:.3g} on average before the first update, and at every log since."
            yield self._finding(window, points, what, first_step=0, is_off_at_first=True)
        elif self._is_moving_away(points):
            what = f"Importance ratios were one at first, are off by {points[-1][1]:.3g} on average now, and have never come back."
            since = max(step for step, mean, _ in points if mean < self.min_mean)
            yield self._finding(window, points, what, first_step=since, is_off_at_first=False)

    def _is_off_throughout(self, points: Sequence[tuple[int, float, float]]) -> bool:
        """Whether every log is off; for the mean, which fluctuates, half of the limit is enough at single logs."""
        if min(most for _, _, most in points) >= self.min_deviation:
            return True
        means = [mean for _, mean, _ in points]
        return median(means) >= self.min_mean and min(means) >= self.min_mean / 2

    def _is_moving_away(self, points: Sequence[tuple[int, float, float]]) -> bool:
        """Whether it was one at the very first, never again, and is far away now."""
        last = max((place for place, (_, mean, _) in enumerate(points) if mean < self.min_mean), default=len(points))
        since = points[last + 1 :]
        newest = since[-self.away_logs :]
        is_far = len(newest) == self.away_logs and min(mean for _, mean, _ in newest) > self.away
        # Updates from one rollout return to one with the next: only the first steps of the run were near it.
        return is_far and 3 * last < len(points)

    def _finding(
        self,
        window: Window,
        points: Sequence[tuple[int, float, float]],
        summary: str,
        *,
        first_step: int,
        is_off_at_first: bool,
    ) -> Finding:
        return Finding(
            detector=self.name,
            severity="warning",
            first_step=first_step,
            detected_step=points[self.min_logs - 1][0] if is_off_at_first else points[-1][0],
            ranks=tuple(sorted(window.attached)),
            summary=summary,
            facts={
                "is_off_at_first": is_off_at_first,
                "is_moving_away": not is_off_at_first,
                "is_ever_one": False,
                "series": [MEAN_DEVIATION, DEVIATION],
            },
            evidence=(
                Evidence(
                    kind="series",
                    summary=f"distance of ratios from one on the first micro-step: {points[0][1]:.3g} on average and {points[0][2]:.3g} at most at step {points[0][0]}, "
                    f"{points[-1][1]:.3g} and {points[-1][2]:.3g} at step {points[-1][0]}",
                    values={"first": points[0][2], "last": points[-1][2], "num_logs": len(points)},
                ),
            ),
        )
