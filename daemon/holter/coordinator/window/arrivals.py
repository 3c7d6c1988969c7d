"""When ranks entered the collectives of each step, and how late each rank was. Pure, incremental, bounded.

    rank 0   step 40: call 7 at 1.20 s      step 40: complete when every reporting rank has reported a newer step;
    rank 1   step 40: call 7 at 1.25 s               then its ranks' lags are known, and rank 1 is 50 ms late

A rank's lag is the largest over the step's collectives, behind the median of the others. A rank that was itself held up
elsewhere is not to blame: if it waited in a collective of another group for a rank that came late, the delay that it
brings from there to the next group does not count.

    group tp   rank 0 at 0 ms, waits    rank 1 at 50 ms
    group dp   rank 0 at 51 ms          rank 2 at 1 ms                  rank 0 is excused, rank 1 is to blame

Calls are matched by group and number, whatever step a rank assigns them to; the step that most ranks say is taken.
Times are kept until a step is reduced for good: 16,000 ranks that report 16 calls of a step take 4 MB, so with more
ranks fewer steps wait for the slowest. As long as no rank is further behind than that, the result does not depend on
the order of the reports.
"""

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from holter.faults.window import Arrival, StepArrivals
from holter.records import StepCalls, Traffic

MAX_TIMES = 4_000_000
"""Largest number of arrival times kept in all; each takes 16 bytes."""
MAX_OPEN = 64
"""Largest number of steps whose times are kept."""
MAX_KEPT = 512
"""Largest number of steps that are remembered in reduced form."""
MAX_CALLS = 64
"""Largest number of calls that are accepted of one rank and step."""
MAX_ERROR_NS = 10**9
"""Error of a clock in nanoseconds from which on it says nothing about arrivals."""
MIN_RANKS = 2
"""Smallest number of ranks for which arrivals are compared: one rank alone cannot be late."""
MAX_LATEST = 8
"""Largest number of late ranks kept of one step."""
MAX_SAMPLED = 64
"""Number of ranks from which the usual lag is taken, if there are more."""
MAX_SPREAD_TIMES = 1024
"""Number of times from which the spread of a collective is taken, if there are more."""
HELD_SHARE = 0.5
"""A rank is excused if it waited elsewhere for this share of its lag."""

Lag = tuple[float, str, int]
"""(microseconds, group, sequence)."""
Key = tuple[int, str, int]
"""(number of the rank's process, group, sequence): a new process counts its calls from the beginning."""


class Meeting:
    """One collective: which ranks entered it, and when."""

    __slots__ = ("entered", "group", "last", "sequence", "times")

    def __init__(self, group: str, sequence: int, entered: Mapping[int, int]) -> None:
        self.group, self.sequence = group, sequence
        self.entered = entered
        """For each rank, when it entered, in microseconds by the coordinator's clock."""
        self.times = sorted(entered.values())
        self.last = self.times[-1]

    def lag(self, rank: int) -> float:
        """Return the microseconds behind the median of the others; negative for a rank that came before it."""
        time = self.entered[rank]
        return time - median_without(self.times, bisect_left(self.times, time))

    def latest(self) -> list[int]:
        """Return the few ranks that came last, the last one first."""
        late = self.times[-MAX_LATEST:][0]
        found = ((-time, rank) for rank, time in self.entered.items() if time >= late)
        return [rank for _, rank in sorted(found)[:MAX_LATEST]]

    def spread(self) -> float:
        """Return the median distance of all arrivals but the last from their median."""
        others = self.times[: -1 : -(-len(self.times) // MAX_SPREAD_TIMES)]
        centre = median_of_sorted(others)
        return median_of_sorted(sorted(abs(time - centre) for time in others))


@dataclass(frozen=True)
class StepReports:
    """What ranks reported of one step, besides their calls."""

    data_s: Mapping[int, float]
    error_us: Mapping[int, int]
    """For each rank, the uncertainty of its clock in microseconds."""
    pressure: Mapping[int, float] = field(default_factory=dict)
    """For each rank, the pressure on its host's processors."""


class _Call:
    """One collective, as reported so far."""

    __slots__ = ("at_ns", "ranks", "step", "times", "votes")

    def __init__(self, step: int) -> None:
        self.step = step
        """The step that most ranks say; among equally many the earliest."""
        self.votes = {step: 0}
        self.at_ns = 0
        self.ranks = array("l")
        self.times = array("q")


class _OpenStep:
    """A step whose times are kept."""

    __slots__ = ("at_ns", "calls", "data_s", "errors", "pressures", "ranks", "reduced")

    def __init__(self) -> None:
        self.at_ns = 0
        self.calls: dict[Key, _Call] = {}
        self.ranks = array("l")
        self.data_s = array("d")
        self.errors = array("q")
        self.pressures = array("f")
        self.reduced: tuple[StepArrivals | None] | None = None
        """The last result in a tuple; None after a change."""

    def num_times(self) -> int:
        return sum(len(call.times) for call in self.calls.values())

    def reduce(self, step: int) -> StepArrivals | None:
        """Return the step in reduced form; None if no two ranks reported the same collective."""
        if self.reduced is None:
            meetings = list(self._meetings())
            at_ns = max((call.at_ns for call in self.calls.values()), default=0)
            told = StepReports(
                dict(zip(self.ranks, self.data_s, strict=True)),
                dict(zip(self.ranks, self.errors, strict=True)),
                dict(zip(self.ranks, self.pressures, strict=True)),
            )
            self.reduced = (reduce_step(step, max(at_ns, self.at_ns), meetings, told) if meetings else None,)
        return self.reduced[0]

    def _meetings(self) -> Iterator[Meeting]:
        """Yield collectives that two ranks reported; after a restart, only those of the newest processes."""
        shared = {key: dict(zip(call.ranks, call.times, strict=True)) for key, call in self.calls.items()}
        shared = {key: entered for key, entered in shared.items() if len(entered) >= MIN_RANKS}
        newest = max((life for life, _, _ in shared), default=0)
        for (life, group, sequence), entered in sorted(shared.items()):
            if life == newest:
                yield Meeting(group, sequence, entered)


class ArrivalBook:
    """The arrivals of ranks at the collectives of all remembered steps."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}
        """For each rank, the newest step it reported."""
        self._lives: dict[int, int] = {}
        self._newest_life = 0
        self._calls: dict[Key, _Call] = {}
        self._open: dict[int, _OpenStep] = {}
        self._num_times = 0
        self._floor = 0
        """Steps below this one are reduced for good."""
        self._kept: dict[int, StepArrivals] = {}
        self._arrivals: tuple[StepArrivals, ...] | None = ()

    def add(self, rank: int, traffic: Traffic, received_ns: int) -> None:
        """Take in one rank's report."""
        base_us = (traffic.base_ns + traffic.clock_offset_ns) // 1000
        for told in traffic.steps:
            newest = self._told.get(rank, -1)
            self._told[rank] = max(told.step, newest)
            # A record that is sent again on the next connection was already counted.
            if told.step <= newest and (known := self._open.get(told.step)) is not None and rank in known.ranks:
                continue
            if told.step >= self._floor and traffic.clock_error_ns < MAX_ERROR_NS:
                self._add_step(rank, told, base_us, traffic, received_ns)
        if traffic.steps:
            self._arrivals = None
            self._make_room()

    def take_back(self, rank: int, step: int) -> None:
        """Discard what this rank reported of this step and later ones, because it has started again before them."""
        self._told.pop(rank, None)
        life = self._lives[rank] = self._lives.get(rank, 0) + 1
        if life <= self._newest_life:
            return
        # The first of perhaps thousands that start again: nothing of the former life is waited for any more.
        self._newest_life = life
        self._arrivals = None
        for old in [known for known in self._open if known >= step]:
            self._forget(old)
        self._kept = {known: value for known, value in self._kept.items() if known < step}
        self._floor = min(self._floor, step)

    def arrivals(self) -> tuple[StepArrivals, ...]:
        """Return the reduced steps, ascending; the same object as long as nothing changed."""
        if self._arrivals is None:
            # Steps before this are complete: every reporting rank has reported a newer one. A rank whose step was
            # dropped to make room is not waited for.
            complete = min((step for step in self._told.values() if step >= self._floor), default=self._floor)
            waiting = (self._open[step].reduce(step) for step in sorted(self._open) if step < complete)
            found = self._kept | {reduced.step: reduced for reduced in waiting if reduced is not None}
            self._arrivals = tuple(found[step] for step in sorted(found)[-MAX_KEPT:])
        return self._arrivals

    def _add_step(self, rank: int, told: StepCalls, base_us: int, traffic: Traffic, received_ns: int) -> None:
        life = self._lives.get(rank, 0)
        opened = self._opened(told.step)
        opened.ranks.append(rank)
        opened.data_s.append(told.data_s)
        opened.errors.append(traffic.clock_error_ns // 1000)
        opened.pressures.append(traffic.pressure)
        opened.reduced = None
        opened.at_ns = max(opened.at_ns, received_ns)
        for group, sequence, after_us in told.calls[:MAX_CALLS]:
            key = (life, group, sequence)
            call = self._calls.get(key)
            if call is None:
                call = self._calls[key] = opened.calls[key] = _Call(told.step)
            call.at_ns = max(call.at_ns, received_ns)
            call.ranks.append(rank)
            call.times.append(base_us + after_us)
            call.votes[told.step] = call.votes.get(told.step, 0) + 1
            self._num_times += 1
            if told.step != call.step:
                self._settle(key, call)
                self._open[call.step].reduced = None

    def _settle(self, key: Key, call: _Call) -> None:
        """Move a call to the step that most ranks say it belongs to, if they disagree."""
        step = min(call.votes, key=lambda step: (-call.votes[step], step))
        if step != call.step and step >= self._floor:
            before = self._open[call.step]
            before.reduced = None
            del before.calls[key]
            self._opened(step).calls[key] = call
            call.step = step

    def _opened(self, step: int) -> _OpenStep:
        opened = self._open.get(step)
        if opened is None:
            opened = self._open[step] = _OpenStep()
        return opened

    def _make_room(self) -> None:
        """Reduce the oldest steps for good, with the ranks that have reported so far."""
        while len(self._open) > MAX_OPEN or (self._num_times > MAX_TIMES and len(self._open) > 1):
            oldest = min(self._open)
            reduced = self._open[oldest].reduce(oldest)
            if reduced is not None:
                self._kept[oldest] = reduced
            self._forget(oldest)
            self._floor = oldest + 1
        while len(self._kept) > MAX_KEPT:
            del self._kept[min(self._kept)]

    def _forget(self, step: int) -> None:
        opened = self._open.pop(step)
        self._num_times -= opened.num_times()
        for key in opened.calls:
            del self._calls[key]


def reduce_step(step: int, at_ns: int, meetings: Sequence[Meeting], told: StepReports) -> StepArrivals:
    """Reduce one step; every meeting has at least two ranks."""
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


def median_of_sorted(ordered: Sequence[float]) -> float:
    """Return the median of sorted values."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def median_without(ordered: Sequence[float], place: int) -> float:
    """Return the median of sorted values, leaving out the one at `place`."""
    half, is_odd = divmod(len(ordered) - 1, 2)
    upper = ordered[half + (half >= place)]
    return upper if is_odd else (ordered[half - 1 + (half - 1 >= place)] + upper) / 2


def _lag(rank: int, meetings: Sequence[Meeting]) -> Lag:
    """Return the largest lag that is the rank's own doing; if it brought all of them from elsewhere, the smallest."""
    own = [meeting for meeting in meetings if rank in meeting.entered]
    found = sorted(((meeting.lag(rank), meeting) for meeting in own), key=lambda one: one[0], reverse=True)
    for lag, meeting in found:
        if lag <= 0 or not _is_held_up(rank, lag, meeting, own):
            return lag, meeting.group, meeting.sequence
    lag, meeting = found[-1]
    return min(lag, 0.0), meeting.group, meeting.sequence


def _is_held_up(rank: int, lag: float, late: Meeting, own: Iterable[Meeting]) -> bool:
    """Whether the rank waited for another one in another group before the collective to which it came late."""
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
