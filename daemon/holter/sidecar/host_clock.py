"""Calls that PyTorch's recorder stamped by the host's clock, told by the run's clock.

    host's clock   10:00 10:01 10:02 | set back by two hours | 08:03 08:04
    run's clock    10:00 10:01 10:02                           10:03 10:04

As long as nobody sets the host's clock the two agree and nothing is changed. One copy of the recorder may hold stamps from before and after: read from the
newest call back, the place where the clock was set is the first one at which two neighbours are as far apart as that step, or out of order.
"""

from collections.abc import Sequence

import msgspec

from holter import clock
from holter.records import Call, Flight

SET_NS = 20_000_000
"""A smaller difference is not corrected: it is within what clocks of two hosts differ by."""


class HostClock:
    """How far the run's clock is ahead of the host's, now and before the host's was last set."""

    def __init__(self) -> None:
        self.ahead_ns = self.former_ns = 0

    def look(self) -> None:
        """Notice whether it was set."""
        ahead_ns = clock.wall_ns() - clock.system_ns()
        if abs(ahead_ns - self.ahead_ns) > SET_NS:
            self.former_ns, self.ahead_ns = self.ahead_ns, ahead_ns

    def of_run(self, flight: Flight) -> Flight:
        """The same calls by the run's clock; `taken_ns` is by that clock already."""
        self.look()
        if not self.ahead_ns and not self.former_ns:
            return flight
        return msgspec.structs.replace(flight, calls=in_run_time(flight.calls, self.ahead_ns, self.former_ns))


def in_run_time(calls: Sequence[Call], ahead_ns: int, former_ns: int) -> list[Call]:
    """Each call's times, where the host's clock was set once among them."""
    found: list[Call] = []
    set_by_ns, shift_ns, newer_ns = former_ns - ahead_ns, ahead_ns, 0
    for call in reversed(calls):
        gap_ns = newer_ns - call.created_ns
        if newer_ns and (gap_ns < 0 if set_by_ns < 0 else gap_ns >= set_by_ns):
            shift_ns = former_ns
        newer_ns = call.created_ns
        found.append(_shifted(call, shift_ns))
    return found[::-1]


def _shifted(call: Call, shift_ns: int) -> Call:
    times = {name: getattr(call, name) for name in ("created_ns", "started_ns", "completed_ns")}
    return msgspec.structs.replace(call, **{name: at + shift_ns if at else 0 for name, at in times.items()})
