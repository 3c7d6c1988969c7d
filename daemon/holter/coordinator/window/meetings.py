"""How late each rank came to the collectives of one step: times in, a few numbers out. Pure.

    call 7     rank 0 at 0 ms   rank 1 at 52 ms   rank 2 at 1 ms        rank 1: 51.5 ms behind the median of the others

A rank's lag is the largest over the step's collectives. A rank that was itself held up elsewhere is not to blame: if it waited in a
collective of another group for somebody who came late, what it brings from there to the next group does not count.

    group tp   rank 0 at 0 ms, waits    rank 1 at 50 ms
    group dp   rank 0 at 51 ms          rank 2 at 1 ms                  rank 0 is excused, rank 1 is the one
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from holter.faults.window import Arrival, StepArrivals

MAX_LATEST = 8
"""Ranks kept of one step."""
MAX_SAMPLED = 64
"""Ranks of which the usual lag is taken, where there are more."""
MAX_TIMES = 1024
"""Of one collective from which its spread is taken, where there are more."""
HELD_SHARE = 0.5
"""A rank that waited elsewhere for this share of its lag is excused."""

Lag = tuple[float, str, int]
"""(microseconds, group, sequence)"""


class Meeting:
    """One collective: who entered it, and when."""

    __slots__ = ("entered", "group", "last", "sequence", "times")

    def __init__(self, group: str, sequence: int, entered: Mapping[int, int]) -> None:
        self.group, self.sequence = group, sequence
        self.entered = entered
        """Rank -> microseconds by the coordinator's clock."""
        self.times = sorted(entered.values())
        self.last = self.times[-1]

    def lag(self, rank: int) -> float:
        """Microseconds behind the median of the others; negative for one that came before them."""
        time = self.entered[rank]
        return time - median_without(self.times, bisect_left(self.times, time))

    def latest(self) -> list[int]:
        """The few that came last, the last one first."""
        late = self.times[-MAX_LATEST:][0]
        found = ((-time, rank) for rank, time in self.entered.items() if time >= late)
        return [rank for _, rank in sorted(found)[:MAX_LATEST]]

    def spread(self) -> float:
        """Median distance of all but the last one from their median."""
        others = self.times[: -1 : -(-len(self.times) // MAX_TIMES)]
        centre = middle(others)
        return middle(sorted(abs(time - centre) for time in others))


@dataclass(frozen=True)
class StepReports:
    """What ranks said of one step, beside their calls."""

    data_s: Mapping[int, float]
    error_us: Mapping[int, int]
    """How well each rank's clock is known."""
    pressure: Mapping[int, float] = field(default_factory=dict)
    """On the processors of each rank's host."""


def reduce(step: int, at_ns: int, meetings: Sequence[Meeting], told: StepReports) -> StepArrivals:
    """One step in a few numbers; every meeting has at least two ranks."""
    ranks = sorted({rank for meeting in meetings for rank in meeting.entered})
    sampled = ranks[:: -(-len(ranks) // MAX_SAMPLED)]
    candidates = {rank for meeting in meetings for rank in meeting.latest()}
    lags = {rank: _lag(rank, meetings) for rank in candidates.union(sampled)}
    latest = heapq.nlargest(MAX_LATEST, lags, key=lambda rank: (lags[rank][0], -rank))
    usual = [lags[rank][0] for rank in sampled if rank != latest[0]]
    errors = [told.error_us.get(rank, 0) for rank in ranks]
    data = sorted(told.data_s.values())
    return StepArrivals(
        step=step,
        at_ns=at_ns,
        num_ranks=len(ranks),
        num_calls=len(meetings),
        latest=tuple(_arrival(rank, lags[rank], told, data) for rank in latest),
        spread_s=median(meeting.spread() for meeting in meetings) / 1e6,
        error_s=(median(errors) + max(told.error_us.get(rank, 0) for rank in latest)) / 1e6,
        usual_s=max(0.0, median(usual)) / 1e6,
    )


def middle(ordered: Sequence[float]) -> float:
    """Median of what is sorted already."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def median_without(ordered: Sequence[float], place: int) -> float:
    """Median of what is sorted already, one place left out."""
    half, is_odd = divmod(len(ordered) - 1, 2)
    upper = ordered[half + (half >= place)]
    return upper if is_odd else (ordered[half - 1 + (half - 1 >= place)] + upper) / 2


def _lag(rank: int, meetings: Sequence[Meeting]) -> Lag:
    """The largest that is the rank's own doing; if all it shows was brought from elsewhere, the smallest."""
    own = [meeting for meeting in meetings if rank in meeting.entered]
    found = sorted(((meeting.lag(rank), meeting) for meeting in own), key=lambda one: one[0], reverse=True)
    for lag, meeting in found:
        if lag <= 0 or not _is_held_up(rank, lag, meeting, own):
            return lag, meeting.group, meeting.sequence
    lag, meeting = found[-1]
    return min(lag, 0.0), meeting.group, meeting.sequence


def _is_held_up(rank: int, lag: float, late: Meeting, own: Iterable[Meeting]) -> bool:
    """Whether it waited for somebody in another group, and went from there to where it came late."""
    needed = HELD_SHARE * lag
    arrived = late.entered[rank]
    return any(
        meeting.group != late.group
        and meeting.entered[rank] + needed <= meeting.last <= arrived
        and meeting.lag(rank) < needed
        for meeting in own
    )


def _arrival(rank: int, lag: Lag, told: StepReports, data: Sequence[float]) -> Arrival:
    own = told.data_s.get(rank, 0.0)
    others = median_without(data, bisect_left(data, own)) if rank in told.data_s and len(data) > 1 else 0.0
    return Arrival(rank, lag[0] / 1e6, lag[1], lag[2], own, others, told.pressure.get(rank, 0.0))
