"""Converts times that PyTorch's recorder took from the host's clock to the run's clock.

    host's clock   10:00 10:01 10:02 | set back by two hours | 08:03 08:04
    run's clock    10:00 10:01 10:02                           10:03 10:04

As long as nobody sets the host's clock, the two agree and nothing is changed. One copy of the recorder may hold times from
before and after a change: reading back from the newest call, the clock was set at the first place where two neighbours are
out of order or at least as far apart as the change.
"""

from collections.abc import Sequence

import msgspec

from holter import clock
from holter.records import Call, Flight

SET_NS = 20_000_000
"""Nanoseconds: a smaller difference is not corrected, because clocks of two hosts differ by as much."""


class HostClock:
    """How far the run's clock is ahead of the host's, now and before the host's clock was last set."""

    def __init__(self) -> None:
        self.ahead_ns = self.former_ns = 0

    def look(self) -> None:
        """Notice whether the host's clock was set."""
        ahead_ns = clock.wall_ns() - clock.system_ns()
        if abs(ahead_ns - self.ahead_ns) > SET_NS:
            self.former_ns, self.ahead_ns = self.ahead_ns, ahead_ns

    def of_run(self, flight: Flight) -> Flight:
        """Return the copy with its calls in the run's time; `taken_ns` is in that time already."""
        self.look()
        if not self.ahead_ns and not self.former_ns:
            return flight
        return msgspec.structs.replace(flight, calls=in_run_time(flight.calls, self.ahead_ns, self.former_ns))


def in_run_time(calls: Sequence[Call], ahead_ns: int, former_ns: int) -> list[Call]:
    """Convert the times of the calls to the run's time, if the host's clock was set at most once among them."""
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
