"""A late rank against the others: how late at each step, what could excuse or explain it, and whether its lag keeps to a level.

Nothing here decides whether a rank is slow: `slow_rank` does. A lag that only wanders about is told by the error of its mean:

    50 51 49 50 52 48 51 ...     each says something new: the mean of n is known to their deviation / sqrt(n)
    20 35 60 80 85 70 60 ...     each repeats the one before: for one that remembers `r` of the last, n are worth n (1 - r) / (1 + r)

A short stretch cannot show how long its noise remembers, so that the most it may remember is believed, not the most likely; where it
may be a random walk, nothing is known of its mean.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median, stdev

from holter.faults.shared import device_notes
from holter.faults.shared.robust import deviation
from holter.faults.window import Arrival, StepArrivals, Window
from holter.records import Census, Device, Evidence

IN_DATA_SHARE = 0.6
"""Share of the lag that the data loader must explain."""
SHARED_LATENESS = 0.5
"""A rank with this share of the latest one's lag is among the latest."""
LOW_CLOCK = 0.9
"""Share of the others' clock; if all devices are held down, only one below this counts."""
PRESSED = 0.25
"""Pressure on a host's processors that is worth mentioning."""
MAX_CENSUSES = 64
"""Number of different censuses that are compared."""
WORK = ("batch.num_samples", "micro_steps")
"""Numbers that say how much a rank has to do in a step."""
MAX_MEMORY = 0.98
"""A memory above this cannot be distinguished from a random walk."""
MAX_DEVIATIONS = 4.0
"""A number further from the median counts as this many deviations away: one pause of seconds says nothing about the rest."""
MIN_CLIP = 0.1
"""Share of the median: clipping is never narrower than this."""
MEMORY_ERRORS = 2.5
"""Number of standard errors that are added to the measured memory."""
BINNED_ERRORS = 1.0
"""The same for binned numbers, which are few and only the second opinion."""
BIN = 4
"""Number of values in a bin: noise without memory may hide noise with memory, which binned values show."""
MIN_BINS = 20


@dataclass(frozen=True)
class StepLag:
    """One rank's lag at one step."""

    step: int
    excess_s: float
    """Its lag less what is usual among the others at their worst collectives."""
    is_among_latest: bool
    usual_s: float
    spread_s: float
    error_s: float
    arrival: Arrival | None
    """Its arrival; None if it was not among the few latest."""
    pressure: float = 0.0
    """Pressure on its host's processors, 0 to 1."""


@dataclass(frozen=True)
class Late:
    """A rank that is slow, and the steps that prove it."""

    rank: int
    points: tuple[StepLag, ...]
    first_step: int
    limit_s: float
    error_s: float
    """Standard error of its lag in seconds, allowing for the memory of its noise."""

    @cached_property
    def arrivals(self) -> list[Arrival]:
        """Its arrivals at the steps where it was late."""
        return [
            point.arrival for point in self.points if point.arrival is not None and point.excess_s >= self.limit_s / 2
        ]

    @property
    def lag_s(self) -> float:
        """Median lag over those steps."""
        return median(arrival.lag_s for arrival in self.arrivals)

    @property
    def data_excess_s(self) -> float:
        """Seconds that it spends in its data loader beyond the others."""
        return median(arrival.data_s - arrival.others_data_s for arrival in self.arrivals)

    @property
    def is_in_data(self) -> bool:
        """Whether waiting for batches explains its lag."""
        return self.data_excess_s >= IN_DATA_SHARE * self.lag_s

    @property
    def where(self) -> Arrival:
        """Its newest late arrival, in the group where it is late most often."""
        group = Counter(arrival.group for arrival in self.arrivals).most_common(1)[0][0]
        return next(arrival for arrival in reversed(self.arrivals) if arrival.group == group)


@dataclass(frozen=True)
class Work:
    """Whether a rank has more to do than the others."""

    is_more: bool | None
    """Whether it has more to do; None if that is unknown."""
    why: str = ""


def point(one: StepArrivals, rank: int) -> StepLag:
    """Return one rank's lag at one step; a rank that is not among the few latest was not late."""
    arrival = next((known for known in one.latest if known.rank == rank), None)
    others = [known.lag_s for known in one.latest if known.rank != rank]
    usual = max(0.0, median(others)) if others and len(one.latest) == one.num_ranks else one.usual_s
    lag = 0.0 if arrival is None else arrival.lag_s
    is_among_latest = arrival is not None and lag >= SHARED_LATENESS * one.latest[0].lag_s
    pressure = 0.0 if arrival is None else arrival.pressure
    return StepLag(one.step, lag - usual, is_among_latest, usual, one.spread_s, one.error_s, arrival, pressure)


def lost_s(window: Window, late: Late, slow: set[int]) -> float:
    """Return the seconds by which a step would be shorter without the slow ranks.

    They are counted to the latest rank that is not one of them.
    """
    steps = {point.step for point in late.points}
    lost = []
    for one in window.calls.arrivals:
        if one.step in steps and one.latest:
            next_lag = next((arrival.lag_s for arrival in one.latest if arrival.rank not in slow), one.usual_s)
            lost.append(max(0.0, one.latest[0].lag_s - max(0.0, next_lag)))
    return median(lost) if lost else 0.0


def work(window: Window, late: Late, max_ratio: float) -> Work:
    """Find out whether the rank has more to do, from its batches, its micro-steps and its part of the model."""
    steps = {point.step for point in late.points}
    is_known = False
    for name in WORK:
        said = [spread for step, spread in window.values(name) if step in steps and spread.num > 1]
        is_known = is_known or bool(said)
        more = sum(spread.high_rank == late.rank and spread.high > max_ratio * spread.mean for spread in said)
        if 2 * more > len(said):
            highs = median(spread.high for spread in said)
            return Work(True, f"{name} is {highs:g} on rank {late.rank}, {median(s.mean for s in said):g} in the mean")
    if late.rank not in window.models.census:
        return Work(False if is_known else None)
    if not _is_like_most(window, late.rank):
        return Work(True, f"rank {late.rank} holds another part of the model than most ranks")
    return Work(False)


def is_throttled(window: Window, rank: int) -> bool | None:
    """Whether its device is held down while most others are not, or less so; None without a reading."""
    newest = {note.rank: device for note, device in window.notes_of(Device)}
    own = newest.pop(rank, None)
    if own is None:
        return None
    others = list(newest.values())
    num_alike = sum(bool(set(own.throttled_by) & set(other.throttled_by)) for other in others)
    is_alike = bool(others) and 2 * num_alike >= len(others)
    clocks = [other.clock_mhz for other in others if other.clock_mhz]
    is_lower = bool(clocks) and own.clock_mhz is not None and own.clock_mhz < LOW_CLOCK * median(clocks)
    return bool(own.throttled_by) and (not is_alike or is_lower)


def evidence(late: Late) -> Evidence:
    """Return how late the rank was, how often, and compared with what."""
    arrivals, points = late.arrivals, late.points
    others_s = median(point.spread_s for point in points)
    pressure = median(point.pressure for point in points)
    return Evidence(
        kind="arrival_lag",
        summary=(
            f"rank {late.rank} entered collectives {late.lag_s * 1e3:.1f} ms after the median of the others in {len(arrivals)} of "
            f"{len(points)} steps that were compared ({points[0].step} to {points[-1].step}), last number {late.where.sequence} of "
            f"group {late.where.group}; this lag is known to {late.error_s * 1e3:.1f} ms, from {late.limit_s * 1e3:.0f} ms on a rank is slow"
            f"{f', the others differ by {others_s * 1e3:.1f} ms' if others_s else ''}"
            f"{f'; tasks wait for a processor of its host {pressure:.0%} of the time' if pressure >= PRESSED else ''}"
        ),
        values={
            "rank": late.rank,
            "lag_s": late.lag_s,
            "num_late": len(arrivals),
            "num_steps": len(points),
            "first_step": late.first_step,
            "limit_s": late.limit_s,
            "error_s": late.error_s,
            "pressure": pressure,
            "spread_s": others_s,
            "usual_s": median(point.usual_s for point in points),
            "clock_error_s": median(point.error_s for point in points),
            "group": late.where.group,
            "sequence": late.where.sequence,
        },
    )


def causes(window: Window, group: Sequence[tuple[Late, Work]]) -> Iterator[Evidence]:
    """Yield what explains or excuses the first rank of the group: data, device, work."""
    late, found = group[0]
    own, others = median(a.data_s for a in late.arrivals), median(a.others_data_s for a in late.arrivals)
    share = f"{late.data_excess_s / late.lag_s:.0%} of its lag" if late.is_in_data else "that does not explain its lag"
    yield Evidence(
        kind="data_wait",
        summary=f"rank {late.rank} spends {own * 1e3:.1f} ms of a step in its data loader, the others {others * 1e3:.1f} ms: {share}",
        values={"rank": late.rank, "data_s": own, "others_data_s": others},
    )
    yield from device_notes.evidence_of(window, late.rank)
    if found.is_more:
        yield Evidence(kind="work", summary=found.why, values={"rank": late.rank})


def _is_like_most(window: Window, rank: int) -> bool:
    """Whether more than half of the ranks hold the same tensors; equal censuses are one object."""
    holders: dict[int, list[Census]] = {}
    for census in window.models.census.values():
        holders.setdefault(id(census), []).append(census)
    told = list(holders.values())[:MAX_CENSUSES]
    own = _holds(window.models.census[rank])
    num_alike = sum(len(alike) for alike in told if _holds(alike[0]) == own)
    return 2 * num_alike > sum(map(len, told)) or len(window.models.census) == 1


def _holds(census: Census) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Return what there is to compute: names and shapes; shards without shapes, which may differ from rank to rank."""
    return frozenset(
        (entry.name, () if entry.is_sharded else entry.shape) for entry in census.entries if not entry.is_buffer
    )


def error_of_mean(values: Sequence[float], num: int = 0) -> float:
    """Return the standard error of the mean of `num` numbers with noise like these (0: as many as these); needs at least 3."""
    kept, num = clipped(values), num or len(values)
    error = _error(kept, num, MEMORY_ERRORS)
    if len(kept) >= BIN * MIN_BINS:
        binned = [fmean(kept[begin : begin + BIN]) for begin in range(0, len(kept) - BIN + 1, BIN)]
        error = max(error, _error(binned, num // BIN, BINNED_ERRORS))
    return error


def memory(values: Sequence[float], errors: float = MEMORY_ERRORS) -> float:
    """Return the upper bound of how much of one number's deviation remains in the next; 0 to `MAX_MEMORY`."""
    mean = fmean(values)
    total = math.fsum((value - mean) ** 2 for value in values)
    if not total:
        return 0.0
    found = math.fsum((one - mean) * (following - mean) for one, following in pairwise(values)) / total
    # Kendall: short series show too little of it.
    found = max(0.0, found + (1 + 3 * max(0.0, found)) / len(values))
    found += errors * math.sqrt(max(0.0, 1 - found * found) / len(values))
    return min(found, MAX_MEMORY)


def clipped(values: Sequence[float]) -> list[float]:
    """Return the values with outliers moved to the edge."""
    centre = median(values)
    width = MAX_DEVIATIONS * max(deviation(values), MIN_CLIP * abs(centre))
    return [min(max(value, centre - width), centre + width) for value in values]


def _error(values: Sequence[float], num: int, errors: float) -> float:
    remembers = memory(values, errors)
    # A level cannot hide in changes from step to step; the deviation within a short stretch is smaller than in the long run.
    surprises = [following - remembers * one for one, following in pairwise(values)]
    noise = max(stdev(values), stdev(surprises) / math.sqrt(1 - remembers * remembers))
    return noise * math.sqrt(min(1.0, (1 + remembers) / (1 - remembers) / num))
