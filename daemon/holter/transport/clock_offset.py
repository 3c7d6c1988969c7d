r"""Estimate how far a host's clock is from the coordinator's, from questions and answers. Pure.

    sidecar      asked ----\                       /----> heard
    coordinator             received ---- replied

The offset lies within half a round trip of ((received - asked) + (replied - heard)) / 2, however unequal the two ways
are. So the quickest of the last answers is the best one. Clocks drift, so an answer is worth less as it grows older. An
answer that contradicts an earlier one shows that a clock was set: everything before it is forgotten.
"""

from collections import deque
from dataclasses import dataclass

UNKNOWN_NS = 10**18
"""Error of an offset that is not known."""
MAX_SAMPLES = 16
DRIFT = 50e-6
"""Rate at which two clocks may drift apart, in seconds per second: quartz is better, and time servers do not correct
faster for long."""


@dataclass(frozen=True)
class Sample:
    """One answer."""

    heard_ns: int
    """When the answer was heard, by the clock of the one who asked."""
    offset_ns: int
    half_trip_ns: int

    def error_ns(self, now_ns: int) -> int:
        """Return how far off the offset may be by now."""
        return self.half_trip_ns + int(DRIFT * abs(now_ns - self.heard_ns))


class ClockOffset:
    """The offset of the coordinator's clock.

    Adding `offset_ns` to this host's clock gives the coordinator's time, to plus or minus `error_ns`.
    """

    def __init__(self) -> None:
        self.offset_ns = 0
        self.error_ns = UNKNOWN_NS
        self.num_answers = 0
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def be_same(self) -> None:
        """Note that both sides read the same clock."""
        self._samples.clear()
        self.offset_ns = self.error_ns = 0

    def learn(self, asked_ns: int, received_ns: int, replied_ns: int, heard_ns: int, *, told_error_ns: int = 0) -> None:
        """Take in an answer; `told_error_ns` is the other side's own uncertainty about the clock it told."""
        trip_ns = (heard_ns - asked_ns) - (replied_ns - received_ns)
        if heard_ns < asked_ns or replied_ns < received_ns or trip_ns < 0 or told_error_ns < 0:
            return  # A clock was set in between.
        self.num_answers += 1
        offset_ns = ((received_ns - asked_ns) + (replied_ns - heard_ns)) // 2
        drifted_ns = int(DRIFT * (heard_ns - asked_ns))
        fresh = Sample(heard_ns, offset_ns, trip_ns // 2 + drifted_ns + told_error_ns + 1)
        if any(
            abs(offset_ns - known.offset_ns) > fresh.half_trip_ns + known.error_ns(heard_ns) for known in self._samples
        ):
            self._samples.clear()
        self._samples.append(fresh)
        self.settle(heard_ns)

    def settle(self, now_ns: int) -> None:
        """Choose the answer that is best at this time."""
        if self._samples:
            best = min(self._samples, key=lambda sample: sample.error_ns(now_ns))
            self.offset_ns, self.error_ns = best.offset_ns, best.error_ns(now_ns)
