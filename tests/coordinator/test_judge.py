"""How long after its beginning a fault was found."""

from collections.abc import Sequence

import pytest

from holter.clock import compact
from holter.coordinator.judge import IncidentTracker
from holter.faults import RankExit, Window
from holter.faults.window import StepNumbers
from holter.records import Exited, Finding, Phase
from made_up import made_window

SECOND = 1_000_000_000


def finding(detector: str, **facts: object) -> Finding:
    return Finding(
        detector=detector, severity="critical", first_step=20, detected_step=20, ranks=(1,), summary="s", facts=facts
    )


def settled_after_s(seen: Finding, window: Window, now_s: float) -> float | None:
    (diagnosis,) = IncidentTracker("run", "notify").settle([seen], window, int(now_s * SECOND))
    return diagnosis.detected_after_s


def test_a_hang_is_counted_from_when_its_step_was_overdue() -> None:
    window = made_window(now_ns=109 * SECOND, world_size=2, attached=frozenset({0, 1}))
    stalled = finding("stalled_rank", is_suspended=True, overdue_at_ns=107 * SECOND)
    assert 1.5 == settled_after_s(stalled, window, 108.5)
    assert 0.0 == settled_after_s(stalled, window, 106.9)


def test_a_death_is_counted_from_itself() -> None:
    exited = Exited(
        pid=1, exit_code=None, signal=9, out_of_memory=False, last_step=20, last_phase=Phase.DATA, farewell=None
    )
    window = made_window(exits=(RankExit(1, 100 * SECOND, exited),))
    assert 2.0 == settled_after_s(finding("dead_rank", is_signal=True), window, 102.0)


@pytest.mark.parametrize("detector", ["stalled_rank", "dead_rank"])
def test_what_nobody_saw_begin_has_no_time(detector: str) -> None:
    window = made_window()
    assert settled_after_s(finding(detector), window, 102.0) is None


def test_a_hang_is_counted_from_when_the_rank_last_moved() -> None:
    stalled = finding("stalled_rank", is_suspended=True, overdue_at_ns=107 * SECOND, began_at_ns=103 * SECOND)
    assert 5.5 == settled_after_s(stalled, made_window(), 108.5)


STALLED = finding("stalled_rank", is_suspended=True)


def moving(now_s: int) -> Window:
    """A step a second, from the beginning until now."""
    series = tuple(StepNumbers(number, number * SECOND, {}) for number in range(now_s))
    return made_window(now_ns=now_s * SECOND, world_size=2, attached=frozenset({0, 1}), series=series)


def settled(
    tracker: IncidentTracker, now_s: int, *found: Finding, is_final: bool = False, passed: Sequence[str] = ()
) -> list[tuple[str, bool, int]]:
    """(id, whether it is open, strikes) of what is told."""
    told = tracker.settle(found, moving(now_s), now_s * SECOND, is_final=is_final, passed=passed)
    return [(one.id.rpartition("-")[2], one.closed_at is None, one.strikes) for one in told]


def test_a_hang_that_is_over_closes_once_and_is_another_strike_when_it_comes_back() -> None:
    tracker = IncidentTracker("run", "notify")
    assert [("1", True, 1)] == settled(tracker, 100, STALLED)
    assert [] == settled(tracker, 110)
    assert [] == settled(tracker, 169)
    assert [("1", False, 1)] == settled(tracker, 170)
    assert [] == settled(tracker, 171), "told once"
    assert [("2", True, 2)] == settled(tracker, 200, STALLED)
    assert [("2", True, 2)] == settled(tracker, 201, is_final=True), "what has just gone is still open at the end"


def test_what_comes_and_goes_within_the_minute_stays_one_incident() -> None:
    tracker = IncidentTracker("run", "notify")
    settled(tracker, 100, STALLED)
    for now_s in range(110, 400, 50):
        assert [] == settled(tracker, now_s)
        assert [] == settled(tracker, now_s + 40, STALLED)


def test_what_the_live_run_saw_pass_does_not_swallow_what_comes_back() -> None:
    tracker = IncidentTracker("run", "notify")
    settled(tracker, 100, STALLED)
    assert [("1", False, 1)] == settled(tracker, 110, passed=["20200101T000000-7", compact(100 * SECOND) + "-1"])
    assert [("2", True, 2)] == settled(tracker, 120, STALLED)
