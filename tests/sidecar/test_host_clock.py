"""Somebody sets the host's clock: calls that were stamped before and after are told by one clock."""

import pytest

from holter import clock
from holter.records import Call, Flight
from holter.sidecar.host_clock import HostClock, in_run_time

SECOND = 10**9
HOUR = 3600 * SECOND
START = 1_800_000_000 * SECOND


def call(number: int, created_ns: int) -> Call:
    return Call("0", number, "all_reduce", ((4,),), ("float32",), created_ns, is_retired=False, record=number)


def stamped(set_by_ns: int, set_before: int) -> list[Call]:
    """Ten calls, a fifth of a second apart; the host's clock is set before one of them."""
    return [call(n, START + n * SECOND // 5 + (set_by_ns if n >= set_before else 0)) for n in range(10)]


@pytest.mark.parametrize("set_by_ns", [-24 * HOUR, -2 * HOUR, -SECOND, SECOND, 2 * HOUR, 24 * HOUR])
@pytest.mark.parametrize("set_before", [0, 4, 9, 10])
def test_calls_before_and_after_are_in_order(set_by_ns: int, set_before: int) -> None:
    told = in_run_time(stamped(set_by_ns, set_before), -set_by_ns, 0)
    if set_before < 10:
        assert [START + n * SECOND // 5 for n in range(10)] == [one.created_ns for one in told]


def test_as_long_as_nobody_sets_it_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    flight, host = Flight(groups=[], calls=stamped(0, 0), taken_ns=START), HostClock()
    assert host.of_run(flight) is flight
    real = clock.system_ns
    monkeypatch.setattr(clock, "system_ns", lambda: real() - 2 * HOUR)
    assert host.of_run(flight).calls[-1].created_ns - flight.calls[-1].created_ns == pytest.approx(2 * HOUR, abs=SECOND)


def test_a_time_that_is_not_known_stays_unknown() -> None:
    (told,) = in_run_time([call(1, START)], HOUR, 0)
    assert (START + HOUR, 0, 0) == (told.created_ns, told.started_ns, told.completed_ns)
