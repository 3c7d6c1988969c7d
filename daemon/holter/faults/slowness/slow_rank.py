"""Slow rank: a rank comes late to collectives, step after step, and everyone waits for it.

What it detects
    Ranks that enter the collectives of nearly every step later than the others, by more than the others differ among themselves and
    by more than the clocks of the hosts do: how late, since when, and how much time the job loses to them at each step. Times come
    from PyTorch's Flight Recorder. Whether the delay is made in the data loader is told from the time spent there, whether the
    device is held down from its own readings.

Why it matters
    A synchronous job is as fast as its slowest rank. Step times do not show it: they are the same on all ranks, because the fast
    ones wait inside the reduction.

False positives
    Delays that come and go do not count: saving, logging or evaluating on one rank, first steps, batches of varying length, ranks that
    are late in turns, a busy machine. All ranks equally slow are not late for each other. A rank that has more to do than the others
    (larger batches, more micro-steps, another part of the model, as pipeline stages have) is not called slow: the evidence is not enough,
    which is reported as information. Sequences that are always longer on one rank cannot be told from slowness. A rank that is slow for
    50 steps in a row, by about the same time at each, and then no longer, is reported: it was slow meanwhile. A lag of less than a
    twentieth of a step is not reported, nor one that is small against the ups and downs of the steps.

What to do
    Look at the named rank's host and device before any code: the code is the same on all ranks (`holter explain slow_compute`,
    `slow_input`, `slow_device`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles, stdev
from typing import ClassVar

from holter.faults.shared.robust import finite
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import ranks_text
from holter.faults.slowness import lateness
from holter.faults.slowness.lateness import Late, StepLag, Work, error_of_mean
from holter.faults.window import StepArrivals, Window
from holter.records import Evidence, Finding

FIRST_STEPS = 3
"""Number of steps of a run in which allocators, compilers and caches warm up, each rank at its own pace."""
MAX_MEMORY = 100
"""Number of steps for which a rank that is still late remains named after it was last clearly slow."""
BACK = 12
"""Number of steps between two looks back."""
GROWTH = 1.4
"""Factor by which each stretch that is looked at is longer than the one before."""
NUM_PARTS = 6
"""Number of parts of a stretch that are compared to see whether it is the same throughout."""
MIN_HISTORY = 24
"""Number of steps before it that are needed to know what is usual."""
STEADY = 0.3
"""A fault adds about the same at each step: half of the steps lie within this share of the lag."""
LEVEL = 0.2
"""The parts of a stretch differ by no more than this share of the lag."""
WELL_AGAIN = 0.5
"""A rank that is late by less than this share of the limit is no longer slow."""


@dataclass(frozen=True)
class SlowRank:
    """Judges which ranks the others wait for."""

    name: ClassVar[str] = "slow_rank"

    min_steps: int = threshold(50, at_least=2 * NUM_PARTS)
    """Number of steps over which a rank must be late."""
    min_span_s: float = threshold(5.0, at_least=0)
    """Seconds over which it must be late, too: a busy machine holds up any rank for a while."""
    wandering_steps: int = 80
    wandering_span_s: float = 7.0
    """Steps and seconds required if its lag differs from step to step: noise may stay on one side for a while."""
    min_lag_s: float = threshold(0.025, at_least=0)
    pressed_lag_s: float = 0.0375
    """The same on a host where some task always waits for a processor: such a host does not serve all ranks alike."""
    min_share_of_step: float = threshold(0.05, at_least=0)
    """Share of a step's usual time that the lag must be: less is not worth looking into."""
    min_spreads: float = threshold(5.0, at_least=0)
    """The lag must be this many times the spread among the other ranks."""
    min_clock_errors: float = threshold(3.0, at_least=0)
    min_share_latest: float = threshold(0.75, above=0.5, at_most=1)
    """Share of the steps in which it must be among the latest."""
    min_significance: float = 6.0
    """The lag must be this many standard errors; the error allows for noise that lasts from step to step."""
    min_share_of_part: float = 0.4
    """In each part of the stretch it must be late by at least this share of its lag."""
    max_work_ratio: float = 1.1
    """A rank with more samples or micro-steps than this, relative to the mean, has more to do."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding for each way of being slow, for all ranks that are slow in that way."""
        arrivals = [one for one in window.calls.arrivals if one.step >= FIRST_STEPS]
        if len(arrivals) < self.min_steps:
            return
        step_s = _step_s(window, arrivals[0].step)
        slow = [
            late
            for rank in _candidates(arrivals[-self.min_steps :])
            if (late := self._late([lateness.point(one, rank) for one in arrivals], rank, step_s)) is not None
        ]
        ways: dict[tuple[bool | None, ...], list[tuple[Late, Work]]] = {}
        for late in slow:
            work = lateness.work(window, late, self.max_work_ratio)
            is_throttled = lateness.is_throttled(window, late.rank)
            ways.setdefault((work.is_more, late.is_in_data, is_throttled), []).append((late, work))
        for (_, _, is_throttled), group in ways.items():
            yield _finding(window, group, slow, step_s, is_throttled=is_throttled)

    def _late(self, points: Sequence[StepLag], rank: int, step_s: float) -> Late | None:
        """Return what the newest steps show, if the rank was clearly slow not long ago and is not clearly better now."""
        newest = points[-self.min_steps :]
        if median(point.excess_s for point in newest) < WELL_AGAIN * self._limit_s(newest, step_s):
            return None
        oldest = max(self.min_steps, len(points) - MAX_MEMORY)
        for end in range(len(points), oldest - 1, -BACK):
            for width in self._widths(points[:end], step_s):
                late = self._judged(points[:end], width, rank, step_s)
                if late is not None:
                    return late
        return None

    def _widths(self, points: Sequence[StepLag], step_s: float) -> Iterator[int]:
        """Yield the lengths of the newest stretches that are long enough, the shortest first, all steps last."""
        width = float(self.min_steps)
        while width < len(points):
            if _span_s(points[-int(width) :], step_s) >= self.min_span_s:
                yield int(width)
            width *= GROWTH
        if _span_s(points, step_s) >= self.min_span_s:
            yield len(points)

    def _judged(self, points: Sequence[StepLag], width: int, rank: int, step_s: float) -> Late | None:
        """Return the rank as late if it was late throughout the newest stretch, beyond its usual variation; otherwise None."""
        part = points[-width:]
        lags = [point.excess_s for point in part]
        lag_s = median(lags)
        if lag_s < self.min_lag_s:
            return None
        limit_s = self._limit_s(part, step_s)
        num_late = sum(point.is_among_latest and point.excess_s >= limit_s / 2 for point in part)
        if lag_s < limit_s or num_late < self.min_share_latest * width:
            return None
        cuts = [width * place // NUM_PARTS for place in range(NUM_PARTS + 1)]
        parts = [median(lags[begin:end]) for begin, end in pairwise(cuts)]
        is_long = width >= self.wandering_steps and _span_s(part, step_s) >= self.wandering_span_s
        if min(parts) < self.min_share_of_part * lag_s or not (is_long or _is_steady(lags, parts, lag_s)):
            return None
        begin = _began(points, limit_s / 2, width)
        usual = [point.excess_s for point in points[:begin]]
        error_s = max(error_of_mean(lags), stdev(parts) / math.sqrt(NUM_PARTS))
        if len(usual) >= MIN_HISTORY:
            error_s = max(error_s, error_of_mean(usual, width))
        if lag_s < self.min_significance * error_s:
            return None
        return Late(rank, tuple(part), points[begin].step, limit_s, error_s)

    def _limit_s(self, part: Sequence[StepLag], step_s: float) -> float:
        """Return the lag from which on a rank is late."""
        pressure = median(point.pressure for point in part)
        return max(
            self.min_lag_s + pressure * max(0.0, self.pressed_lag_s - self.min_lag_s),
            self.min_share_of_step * step_s,
            self.min_spreads * median(point.spread_s for point in part),
            self.min_clock_errors * median(point.error_s for point in part),
            median(point.usual_s for point in part),
        )


def _step_s(window: Window, since: int) -> float:
    """Return the median step time; 0 if unknown."""
    said = [value for step, value in finite(window.values("seconds")) if step >= since]
    return median(said) if said else 0.0


def _span_s(part: Sequence[StepLag], step_s: float) -> float:
    return (part[-1].step - part[0].step) * step_s


def _is_steady(lags: Sequence[float], parts: Sequence[float], lag_s: float) -> bool:
    """Whether the lag is about equal at all steps, and no crest of a wave."""
    low_s, _, high_s = quantiles(lags, n=4)
    return high_s - low_s <= STEADY * lag_s and max(parts) - min(parts) <= LEVEL * lag_s


def _candidates(arrivals: Sequence[StepArrivals]) -> list[int]:
    """Return the ranks that are among the latest in half of the steps."""
    seen = Counter(arrival.rank for one in arrivals for arrival in one.latest if arrival.lag_s > 0)
    return sorted(rank for rank, times in seen.items() if 2 * times >= len(arrivals))


def _began(points: Sequence[StepLag], limit_s: float, width: int) -> int:
    """Return the index since which nine of ten steps were late, up to the end of the stretch that proves it."""
    first, num_below = len(points) - width, 0
    for place in range(len(points) - 1, -1, -1):
        if points[place].excess_s >= limit_s:
            first = min(first, place)
        else:
            num_below += 1
            if 10 * num_below > len(points) - place and place < len(points) - width:
                break
    return first


def _finding(
    window: Window,
    group: Sequence[tuple[Late, Work]],
    slow: Sequence[Late],
    step_s: float,
    *,
    is_throttled: bool | None,
) -> Finding:
    lates = [late for late, _ in group]
    ranks = tuple(late.rank for late in lates)
    worst = max(lates, key=lambda late: late.lag_s)
    lost_s = lateness.lost_s(window, worst, {late.rank for late in slow})
    has_other_work = group[0][1].is_more
    return Finding(
        detector=SlowRank.name,
        severity="info" if has_other_work else "warning",
        first_step=min(late.first_step for late in lates),
        detected_step=worst.points[-1].step,
        # A rank that has more to do is not blamed.
        ranks=() if has_other_work else ranks,
        summary=_summary(ranks, worst, lost_s, step_s, is_comparable=not has_other_work),
        facts={
            "is_in_data": worst.is_in_data,
            "is_device_throttled": is_throttled,
            "has_other_work": has_other_work,
            "late_ranks": list(ranks),
        },
        evidence=(
            *(lateness.evidence(late) for late in lates),
            _cost(worst, lost_s, step_s),
            *lateness.causes(window, group),
        ),
    )


def _summary(ranks: tuple[int, ...], worst: Late, lost_s: float, step_s: float, *, is_comparable: bool) -> str:
    who, verb = ranks_text(ranks).capitalize(), "comes" if len(ranks) == 1 else "come"
    said = f"{who} {verb} {worst.lag_s * 1e3:.0f} ms late to collectives, step after step"
    if not is_comparable:
        return f"{said}, but the ranks' work is not comparable: not enough evidence to call {'it' if len(ranks) == 1 else 'them'} slow."
    share = f" ({lost_s / step_s:.0%} of its time)" if step_s else ""
    return f"{said}; the job loses {lost_s * 1e3:.0f} ms{share} at each."


def _cost(worst: Late, lost_s: float, step_s: float) -> Evidence:
    share = f", {lost_s / step_s:.0%} of the {step_s * 1e3:.0f} ms that one takes" if step_s else ""
    return Evidence(
        kind="lost_time",
        summary=f"without rank {worst.rank}'s delay a step would end {lost_s * 1e3:.0f} ms earlier{share}",
        values={"lost_s": lost_s, "step_s": step_s, "lost_share": lost_s / step_s if step_s else None},
    )
