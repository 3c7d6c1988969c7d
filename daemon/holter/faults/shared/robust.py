"""Robust statistics of numbers over time: medians, not means, so that one spike neither alarms nor hides an alarm.

finite(window.values("loss"))   -> [(step, mean over the ranks)], where every rank's number was finite
score(value, history)           -> how many robust deviations above its history, on a linear scale
log_score(value, history)       -> the same on a log scale, for norms and rates
find_rise(points)               -> since when a number is far above its best stretch, and stays there
is_surrogate(window, ...)       -> whether a loss that rises is one that is meant to
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from holter.faults.window import Spread, Window

Points = list[tuple[int, float]]
"""(step, value), ascending by step."""

GAUSSIAN = 1.4826
"""Factor from the median absolute deviation of a normal distribution to its standard deviation."""
MIN_LOG_DEVIATION = 0.1
"""Least deviation on a log scale, for a history without noise: a change of a tenth is no news."""
MIN_RELATIVE_DEVIATION = 0.02
BEYOND_RETURN = 1000.0
"""A number this many times above its level does not come back."""
ZERO_AT_FIRST = 1e-3
"""A loss that began below this share of its present level began at zero."""
OF_THE_ORDER_OF_ONE = 10.0
"""A loss above this is not a penalty on a policy's distance."""
POLICY = frozenset({"log.advantages", "log.ratio", "log.rewards", "ratio.first_deviation"})
"""Names that only a script that trains a policy logs."""
CLIMB_STEPS, MIN_CLIMBS = 10, 5
"""A climb: the median of so many steps is above that of the steps before, so many times in a row."""
MAX_SLOPE_POINTS = 60
"""Number of points of which all pairs are compared; pairs grow with its square."""


def finite(series: Iterable[tuple[int, Spread]]) -> Points:
    """Return the means over the ranks, for steps where every rank's number was finite."""
    return [(step, spread.mean) for step, spread in series if not spread.num_nonfinite and math.isfinite(spread.mean)]


def values(points: Points) -> list[float]:
    """The values of points, without their steps."""
    return [value for _, value in points]


def deviation(history: Sequence[float]) -> float:
    """Return the robust standard deviation: scaled median absolute deviation from the median; 0 for a constant history."""
    centre = median(history)
    return GAUSSIAN * median(abs(value - centre) for value in history)


def score(value: float, history: Sequence[float]) -> float:
    """Return how many robust deviations a value lies above its history."""
    centre = median(history)
    return (value - centre) / max(deviation(history), MIN_RELATIVE_DEVIATION * abs(centre), 1e-30)


def log_score(value: float, history: Sequence[float]) -> float:
    """Return the same on a log scale, for positive values; inf for an infinite value."""
    if math.isinf(value):
        return math.inf
    logs = [math.log(past) for past in history]
    return (math.log(value) - median(logs)) / max(deviation(logs), MIN_LOG_DEVIATION)


def levels(series: Sequence[float], width: int = 5) -> list[float]:
    """Return the running median over `width` values, which single values do not move."""
    return [median(series[i : i + width]) for i in range(len(series) - width + 1)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the Theil-Sen slope: the median slope of all pairs of points.

    At most `MAX_SLOPE_POINTS` points, spread over the series, are paired.
    """
    stride = max(1, math.ceil(len(points) / MAX_SLOPE_POINTS))
    kept = points[::stride]
    rises = [(b - a) / (t - s) for i, (s, a) in enumerate(kept) for t, b in kept[i + 1 :] if t != s]
    return median(rises) if rises else 0.0


@dataclass(frozen=True)
class Rise:
    """A number has left its best stretch upward and stays above it."""

    first_step: int
    last_step: int
    start: float
    """Level of the first steps that are remembered."""
    best: float
    """Level of the best stretch."""
    noise: float
    """Robust deviation in the best stretch."""
    now: float
    """Level of the last steps."""
    num_steps: int
    """Number of steps for which it has stayed up."""
    best_step: int = 0
    """The step at which its best stretch begins."""

    @property
    def factor(self) -> float:
        """How many times its best level it is now; inf if that level is not positive."""
        return self.now / self.best if self.best > 0 else math.inf

    @property
    def is_beyond_return(self) -> bool:
        """Whether it is so high that it does not come back."""
        return self.now > BEYOND_RETURN * max(abs(self.best), abs(self.start))


def find_rise(
    points: Points, *, stretch: int = 20, stay: int = 30, deviations: float = 8.0, factor: float = 2.0
) -> Rise | None:
    """Return a rise that lasts until now and is not falling; None if there is none.

    It is far above the best stretch, and above half of the way back to the start, for at least `stay` steps. A run that got from
    1.4 to 0.0001 and bounces to 0.01 has lost a hundredth of its way: no rise.
    """
    series = values(points)
    if len(series) <= stretch + stay:
        return None
    # The newest stretch cannot be the best one if it has risen; candidates overlap by half.
    begins = range(0, len(series) - stretch - stay, max(1, stretch // 2))
    begin = min(begins, key=lambda i: median(series[i : i + stretch]))
    calm = series[begin : begin + stretch]
    best, start, now = median(calm), median(series[:5]), median(series[-stretch:])
    noise = max(deviation(calm), MIN_RELATIVE_DEVIATION * abs(best))
    limit = max(best + deviations * noise, best + (factor - 1) * abs(best), best + 0.5 * (start - best))
    first = _begin_of_stay(series, limit, begin + stretch)
    num_up = len(series) - first
    if num_up < stay or _is_falling(series[first:], best):
        least = max(best + deviations * noise, best + 0.5 * abs(best), best + 0.5 * (start - best))
        first = _begin_of_climb(series, begin + stretch, least, noise)
        num_up = len(series) - first
    if num_up < stay:
        return None
    return Rise(points[first][0], points[-1][0], start, best, noise, now, num_up, best_step=points[begin][0])


def _begin_of_climb(series: Sequence[float], floor: int, least: float, noise: float) -> int:
    """Return the index since which the series has climbed from each ten steps to the next; its length if it has not.

    It must have climbed at least five times, to at least `least`. Spikes, restarts and harder batches go up at once, and then
    no further.
    """
    begin = len(series)
    blocks: list[float] = []
    while begin - CLIMB_STEPS >= floor:
        block = median(series[begin - CLIMB_STEPS : begin])
        if blocks and block > blocks[-1] - noise / 2:
            break
        blocks.append(block)
        begin -= CLIMB_STEPS
    return begin if len(blocks) >= MIN_CLIMBS and blocks[0] > least else len(series)


def is_surrogate(window: Window, losses: Points, rise: Rise) -> bool:
    """Whether a rising loss is a policy's: about zero whatever it learns, growing with the distance from its reference.

    This shows in what is logged beside it, or in a loss that began at zero: it was never trained down.
    """
    if rise.now > OF_THE_ORDER_OF_ONE:
        return False
    began_at_nothing = losses[0][0] <= 1 and abs(losses[0][1]) < ZERO_AT_FIRST * rise.now
    return began_at_nothing or any(POLICY.intersection(entry.numbers) for entry in window.series[-64:])


def _begin_of_stay(series: Sequence[float], limit: float, floor: int) -> int:
    """Return the index since which nine of ten values, and the last one, have been above the limit."""
    first, num_below = len(series), 0
    for i in range(len(series) - 1, floor - 1, -1):
        if series[i] > limit:
            first = i
        else:
            num_below += 1
            if 10 * num_below > len(series) - i and num_below > 1:
                break
    return first


def _is_falling(stay: Sequence[float], best: float) -> bool:
    """Whether a third of the height has been lost again."""
    part = max(5, len(stay) // 3)
    return median(stay[-part:]) - best < 0.67 * (median(stay[:part]) - best)
