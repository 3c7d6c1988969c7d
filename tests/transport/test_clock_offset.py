"""The offset of a clock is known as well as its error says, whatever the delays are."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.transport.clock_offset import UNKNOWN_NS, ClockOffset

US, MS, S = 10**3, 10**6, 10**9


class Hosts:
    """Two clocks and a network between them, simulated."""

    def __init__(self, offset_ns: int, drift: float = 0.0) -> None:
        self.true_ns = 1_000_000 * S
        self.offset_ns, self.drift = offset_ns, drift
        self.clock = ClockOffset()

    def there_ns(self) -> int:
        return self.true_ns

    def here_ns(self) -> int:
        """The asking host's clock: behind by the offset, and gaining."""
        return self.true_ns - self.real_offset_ns

    @property
    def real_offset_ns(self) -> int:
        return self.offset_ns - int(self.drift * (self.true_ns - 1_000_000 * S))

    def ask(self, up_ns: int, down_ns: int, busy_ns: int = 50 * US, pause_ns: int = 5 * S) -> None:
        asked_ns = self.here_ns()
        self.true_ns += up_ns
        received_ns = self.there_ns()
        self.true_ns += busy_ns
        replied_ns = self.there_ns()
        self.true_ns += down_ns
        self.clock.learn(asked_ns, received_ns, replied_ns, self.here_ns())
        self.true_ns += pause_ns

    def off_ns(self) -> int:
        return abs(self.clock.offset_ns - self.real_offset_ns)


def test_nothing_is_known_before_an_answer_and_all_of_the_own_clock() -> None:
    clock = ClockOffset()
    assert (0, UNKNOWN_NS) == (clock.offset_ns, clock.error_ns)
    clock.be_same()
    assert (0, 0) == (clock.offset_ns, clock.error_ns)


def test_a_coordinator_that_was_busy_costs_nothing() -> None:
    hosts = Hosts(3 * S)
    hosts.ask(100 * US, 100 * US, busy_ns=400 * MS)
    assert 3 * S == hosts.clock.offset_ns
    assert hosts.clock.error_ns < 150 * US


def test_one_quick_answer_among_slow_ones_is_enough() -> None:
    hosts = Hosts(-7 * MS)
    for up_ns, down_ns in [(200 * MS, 1 * MS), (90 * MS, 3 * MS), (60 * US, 40 * US), (250 * MS, 2 * MS)]:
        hosts.ask(up_ns, down_ns)
    assert hosts.off_ns() <= 10 * US
    assert hosts.off_ns() <= hosts.clock.error_ns < 1 * MS


@given(
    offset_ns=st.integers(-3600 * S, 3600 * S),
    drift=st.floats(-40e-6, 40e-6),
    delays=st.lists(st.tuples(st.integers(0, 300 * MS), st.integers(0, 300 * MS)), min_size=1, max_size=60),
)
def test_the_truth_lies_within_the_error(offset_ns: int, drift: float, delays: list[tuple[int, int]]) -> None:
    hosts = Hosts(offset_ns, drift)
    for up_ns, down_ns in delays:
        hosts.ask(up_ns, down_ns, pause_ns=0)
        # Rounding of the simulated drift is a nanosecond or two.
        assert hosts.off_ns() <= hosts.clock.error_ns + 4
        hosts.true_ns += 5 * S
        hosts.clock.settle(hosts.here_ns())
        assert hosts.off_ns() <= hosts.clock.error_ns + 4


def test_it_follows_a_clock_that_drifts() -> None:
    hosts, chance = Hosts(40 * MS, drift=20e-6), random.Random(1)  # noqa: S311 - delays are no secret
    for _ in range(720):
        hosts.ask(100 * US + int(chance.expovariate(1 / MS)), 100 * US + int(chance.expovariate(1 / MS)))
    moved_ns = abs(hosts.real_offset_ns - 40 * MS)
    assert moved_ns > 60 * MS, "an hour of it"
    assert hosts.off_ns() < 2 * MS
    assert hosts.clock.error_ns < 3 * MS


def test_a_clock_that_was_set_is_believed_at_once() -> None:
    hosts = Hosts(0)
    for _ in range(20):
        hosts.ask(50 * US, 50 * US)
    hosts.offset_ns = 2 * S
    hosts.ask(300 * US, 900 * US)
    assert hosts.off_ns() <= hosts.clock.error_ns < 1 * MS


@pytest.mark.parametrize(("received_ns", "replied_ns", "heard_ns"), [(5, 4, 20), (5, 6, 9), (0, 100, 50)])
def test_times_that_cannot_be_are_left_out(received_ns: int, replied_ns: int, heard_ns: int) -> None:
    clock = ClockOffset()
    clock.learn(10, received_ns, replied_ns, heard_ns)
    assert UNKNOWN_NS == clock.error_ns
