"""Whoever sets the host's clock changes nothing for the run; people are told the time of their own clock."""

import time

import pytest

from holter import clock


@pytest.fixture(autouse=True)
def _same_clock_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_base_ns", clock.base_ns())


@pytest.mark.parametrize("jump_s", [-86400, -7200, -1, 1, 7200, 86400])
def test_the_runs_clock_goes_on_when_the_hosts_is_set(monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    before_ns, really = clock.wall_ns(), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: really() + jump_s * 10**9)
    assert 0 <= clock.wall_ns() - before_ns < 10 * 10**9
    assert 1000.0 + jump_s == clock.for_people_s(1000.0)


def test_a_time_that_nobody_knows_is_none_for_people() -> None:
    assert clock.for_people_s(None) is None


def test_one_who_comes_later_goes_on_with_the_clock_of_another() -> None:
    ahead_ns = clock.base_ns() + 3600 * 10**9
    clock.go_on_from(ahead_ns)
    assert ahead_ns == clock.base_ns()
    assert 3599 < (clock.wall_ns() - time.time_ns()) / 1e9 < 3601


def test_what_was_written_down_is_not_in_the_future() -> None:
    written_ns = clock.wall_ns() + 7200 * 10**9
    clock.be_at_least(written_ns)
    assert clock.wall_ns() >= written_ns
    clock.be_at_least(written_ns - 10**9)
    assert clock.wall_ns() >= written_ns
