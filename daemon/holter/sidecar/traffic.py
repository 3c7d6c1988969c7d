"""What is new in a copy of the recorder, small enough to travel: when the collectives of each step were entered, and digests of runs of calls.

Arrivals of two ranks can be compared only where both told the same call, and ranks do not talk about what they tell. So the choice is
made by the numbers themselves: of a step's calls, those whose sequence number is a multiple of 1, 2, 4, ... until few enough remain; of
many steps, those whose number is. What one rank tells at a coarser rate, another tells at a finer one too.

A call belongs to the step that ended next after it.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeVar
from zlib import crc32

from holter.flight import blocks
from holter.records import Call, CallBlock, Flight, Observation, StepCalls, StepDone, Traffic

MAX_CALLS = 16
"""Of a step."""
MAX_STEPS = 64
"""Of a record."""
INTERVAL_S = 1.0
"""Arrivals are told no more often; digests, which are few, at once."""
MAX_UNTOLD = 4096
"""Steps that are remembered until a copy holds their calls."""

MAX_STRIDE = 1 << 62
"""Where numbers repeat, as 0 may, no stride tells them apart."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Ended:
    step: int
    at_ns: int
    data_s: float


class TrafficLog:
    """Remembers which steps and which blocks were told."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=MAX_UNTOLD)
        self._told_until_ns = 0
        self._told_at_ns = 0
        self._told_blocks: dict[str, int] = {}

    def learn(self, observation: Observation) -> None:
        """A step ended; everything else is no news here."""
        body, at_ns = observation.body, observation.at_ns
        if not isinstance(body, StepDone):
            return
        if self._ended:
            # Steps whose numbers came late from the device are told together: the earlier one ended before this one began.
            last = self._ended[-1]
            self._ended[-1] = replace(last, at_ns=min(last.at_ns, at_ns - int(body.seconds * 1e9)))
        self._ended.append(_Ended(observation.step, at_ns, body.phase_seconds.get("data", 0.0)))

    def take(self, flight: Flight, clock_offset_ns: int = 0, clock_error_ns: int = 0) -> Traffic | None:
        """What is new since the last call; None: nothing."""
        new_blocks = self._new_blocks(flight)
        is_due = flight.taken_ns - self._told_at_ns >= INTERVAL_S * 1e9
        steps = self._new_steps(flight) if is_due or new_blocks else []
        if not steps and not new_blocks:
            return None
        self._told_at_ns = flight.taken_ns
        chosen = [chosen_calls(calls) for _, calls in steps]
        base_ns = min((call.created_ns for calls in chosen for call in calls), default=flight.taken_ns)
        return Traffic(
            base_ns=base_ns,
            steps=[
                StepCalls(
                    ended.step,
                    ended.data_s,
                    [(call.group, call.sequence, (call.created_ns - base_ns) // 1000) for call in told],
                    last_numbers(calls),
                )
                for (ended, calls), told in zip(steps, chosen, strict=True)
            ],
            blocks=new_blocks,
            clock_offset_ns=clock_offset_ns,
            clock_error_ns=clock_error_ns,
        )

    def _new_steps(self, flight: Flight) -> list[tuple[_Ended, list[Call]]]:
        # A step that ended while the copy was made may have calls that are not in it.
        ended = list(takewhile(lambda end: end.at_ns <= flight.taken_ns, self._ended))
        if not ended:
            return []
        ends_ns = [end.at_ns for end in ended]
        of_step: dict[int, list[Call]] = defaultdict(list)
        for call in flight.calls:
            index = bisect_left(ends_ns, call.created_ns)
            if not call.is_p2p and index < len(ended) and call.created_ns > self._told_until_ns:
                of_step[index].append(call)
        self._told_until_ns = ends_ns[-1]
        for _ in ended:
            self._ended.popleft()
        chosen = thinned(of_step, MAX_STEPS, lambda index: ended[index].step)
        return [(ended[index], of_step[index]) for index in chosen]

    def _new_blocks(self, flight: Flight) -> list[CallBlock]:
        found = [block for block in blocks(flight) if block.block > self._told_blocks.get(block.group, -1)]
        for block in found:
            self._told_blocks[block.group] = max(block.block, self._told_blocks.get(block.group, -1))
        return found


def chosen_calls(calls: Iterable[Call]) -> list[Call]:
    """At most `MAX_CALLS` of a step's calls, of every group if there is room, in the order of their entry."""
    by_group: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_group[call.group].append(call)
    groups = chosen_groups(by_group)
    share = MAX_CALLS // max(1, len(groups))
    chosen = [call for name in groups for call in thinned(by_group[name], share, lambda call: call.sequence)]
    return sorted(chosen, key=lambda call: call.created_ns)


def last_numbers(calls: Iterable[Call]) -> dict[str, int]:
    """Group -> the highest number of a step, of the groups that are told."""
    lasts: dict[str, int] = {}
    for call in calls:
        lasts[call.group] = max(call.sequence, lasts.get(call.group, call.sequence))
    return {group: lasts[group] for group in chosen_groups(lasts)}


def chosen_groups(groups: Iterable[str]) -> list[str]:
    """By a hash of the name: ranks that share one group, but not all of them, choose it alike."""
    return sorted(groups, key=lambda name: crc32(name.encode()))[:MAX_CALLS]


def thinned(items: Iterable[Item], limit: int, number: Callable[[Item], int]) -> list[Item]:
    """Those whose number is a multiple of the smallest power of two that leaves at most `limit`."""
    left, stride = list(items), 1
    while len(left) > limit and stride < MAX_STRIDE:
        stride *= 2
        left = [item for item in left if number(item) % stride == 0]
    return left[:limit]
