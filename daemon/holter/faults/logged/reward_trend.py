"""Reward trend: the reward has fallen from its best stretch and does not come back.

What it detects
    A logged mean reward that lost more than half of what it had gained, far beyond its noise, for dozens of logs, and is not
    recovering. Or a reward that fell at once, from one log to the next, below all that was logged lately, and stays there.

Why it matters
    Policies that collapse seldom recover by themselves; each further step moves them away from the checkpoint that was good.

False positives
    Rewards are noisy, wander and dip: medians are compared, a fall must be larger than every fall before it, and a dip that comes back
    does not count. A curriculum that turns to harder prompts lowers the reward on purpose and is reported, with moderate confidence.
    Rewards on held-out data are not read.

What to do
    Look at entropy, KL and the length of answers around the named step (`holter explain reward_collapse`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import ClassVar

from holter.faults.shared.logged_series import LoggedPoint, logged
from holter.faults.shared.robust import Rise, deviation, find_rise, levels
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

TENFOLD = 10.0
REWARD = frozenset({"reward", "rewards", "reward_mean", "rewards_mean", "mean_reward"})


@dataclass(frozen=True)
class RewardTrend:
    """Compares a logged reward with its best stretch."""

    name: ClassVar[str] = "reward_trend"

    stretch: int = threshold(20, at_least=5)  # A median of fewer is a guess.
    """Number of logs that make a level."""
    stay: int = 30
    """Number of logs in a row for which it must have stayed down."""
    deviations: float = 8.0
    """Robust deviations of its best stretch by which it must have fallen."""
    wandering: float = 2.5
    """A fall must be this many times the deepest one before it."""
    min_before: int = threshold(12, at_least=5)
    """Number of logs before a sudden fall."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        for name, points in sorted(logged(window, REWARD.__contains__).items()):
            best = max(value for _, value in points)
            regret = [(step, best - value) for step, value in points]
            rise = find_rise(regret, stretch=self.stretch, stay=self.stay, deviations=self.deviations)
            if rise is not None and not self._is_wandering(
                [value for step, value in regret if step < rise.first_step], rise
            ):
                yield _finding(window, name, best, rise)
                return
            if (drop := self._drop(points)) is not None:
                yield _finding(window, name, best, drop)
                return

    def _drop(self, points: Sequence[LoggedPoint]) -> Rise | None:
        """Return a sudden fall from one log to the next, below everything logged lately, after which it stays.

        A wandering reward does not jump.
        """
        series = [value for _, value in points]
        places = range(self.min_before, len(series) - self.stay + 1)
        falls = {i: series[i - 1] - series[i] for i in places if min(self._lately(series, i)) > series[i]}
        if not falls:
            return None
        place = max(falls, key=falls.__getitem__)
        before, after = self._lately(series, place), series[place:]
        if max(after) >= min(before):
            return None
        high, low, part = median(before), median(after), max(5, len(after) // 3)
        fall, best = high - low, max(series)
        is_at_once = median(before[-5:]) > high - fall / 4 and abs(median(after[:5]) - low) < fall / 4
        is_back = median(after[-part:]) - median(after[:part]) > fall / 3
        # A reward as noisy as it is high cannot fall by many deviations, but it can fall to a tenth of itself.
        is_far = fall > self.wandering * max(deviation(before), deviation(after)) or 0 < TENFOLD * low < high
        if not is_at_once or is_back or not is_far or fall < (high - median(series[:5])) / 2:
            return None
        drop = Rise(points[place][0], points[-1][0], best - median(series[:5]), best - high, deviation(before), best - low, len(after))  # fmt: skip
        is_wandering = len(before) < place and self._is_wandering([best - value for value in series[:place]], drop)
        return None if is_wandering else drop

    def _lately(self, series: Sequence[float], place: int) -> Sequence[float]:
        """Return everything before a place if that is little, otherwise the last stretch before it."""
        return series[0 if place <= 2 * self.stretch else place - self.stretch : place]

    def _is_wandering(self, before: Sequence[float], rise: Rise) -> bool:
        """Whether it had fallen about as far before and come back; a reward seen for too short a time counts as wandering."""
        seen = levels(before)
        if len(before) < 2 * self.stretch:
            return True
        deepest = max(level - best for level, best in zip(seen, accumulate(seen, min), strict=True))
        return rise.now - rise.best < self.wandering * deepest


def _finding(window: Window, name: str, top: float, rise: Rise) -> Finding:
    best, now = top - rise.best, top - rise.now
    return Finding(
        detector=RewardTrend.name,
        severity="warning",
        first_step=rise.first_step,
        detected_step=rise.last_step,
        ranks=tuple(sorted(window.attached)),
        summary=f"The reward fell from {best:.3g} to {now:.3g} and has stayed there since step {rise.first_step}.",
        facts={"has_fallen": True, "is_recovering": False, "series": [name]},
        evidence=(
            Evidence(
                kind="series",
                summary=f"{name.removeprefix('log.')}: {top - rise.start:.3g} at first, {best:.3g} at its best, {now:.3g} for {rise.num_steps} logs",
                values={"name": name, "best": best, "now": now, "noise": rise.noise, "num_logs": rise.num_steps},
            ),
        ),
    )
