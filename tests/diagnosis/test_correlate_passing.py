"""What is over closes; what is only out of sight, forgotten, or in the weights does not."""

from typing import Any

import pytest

from holter.diagnosis import Incident
from holter.diagnosis.correlate import HOLD_NS, can_pass, has_passed, stands
from holter.faults import CAUSES
from holter.faults.window import LinkView, RankExit, StepNumbers, Window
from holter.records import ExamRequest, Exited, Finding, Phase
from made_up import made_window

SECOND = 10**9
SINCE_NS = 100 * SECOND


def finding(detector: str, step: int = 20, ranks: tuple[int, ...] = (1,), **facts: Any) -> Finding:
    return Finding(
        detector=detector,
        severity="critical",
        first_step=step,
        detected_step=step,
        ranks=ranks,
        summary="s",
        facts=facts,
    )


STALLED = finding("stalled_rank", is_suspended=True)
SLOW = finding("slow_rank", is_in_data=True)
RISEN = finding("loss_trend", is_rising=True, is_still=False, is_beyond_return=False, came_back=False)
LOST = finding("loss_trend", is_rising=True, is_still=False, is_beyond_return=True, came_back=False)
POISONED = finding("nonfinite_values", has_nonfinite_input=True)
DEAD = finding("dead_rank", is_signal=True)


def window(first_step: int = 0, num_steps: int = 100, **parts: Any) -> Window:
    """A step a second until long after."""
    series = tuple(
        StepNumbers(first_step + number, SINCE_NS + (number - num_steps + 60) * SECOND, {})
        for number in range(num_steps)
    )
    return made_window(series=series, **parts)


def is_over(leading: Finding, seen: Window, after_s: float = 61.0, consequences: tuple[Finding, ...] = ()) -> bool:
    incident = Incident(id="T-1", leading=leading, consequences=consequences)
    return has_passed(incident, SINCE_NS, seen, SINCE_NS + int(after_s * SECOND))


def test_what_is_measured_against_the_past_can_pass() -> None:
    assert all(entry.passes_after_steps for entry in CAUSES.values() if entry.is_measured_against_the_past)


@pytest.mark.parametrize("leading", [STALLED, SLOW, RISEN])
def test_what_was_not_found_for_a_minute_in_which_the_job_went_on_has_passed(leading: Finding) -> None:
    assert is_over(leading, window())
    assert not is_over(leading, window(), after_s=HOLD_NS / SECOND - 1), "too early"


@pytest.mark.parametrize("leading", [POISONED, DEAD, LOST])
def test_what_is_in_the_weights_or_dead_stays(leading: Finding) -> None:
    assert not is_over(leading, window())
    assert not is_over(STALLED, window(), consequences=(leading,)), "as a consequence too"


def test_a_job_that_does_not_go_on_has_not_recovered() -> None:
    assert not is_over(STALLED, window(num_steps=0))
    before = window(num_steps=40)
    still = made_window(series=before.series[:0])
    assert is_over(STALLED, before)
    assert not is_over(STALLED, still)
    assert not is_over(SLOW, window(num_steps=24)), "a few steps do not show that a rank is well again"


def test_a_rank_that_nobody_sees_has_not_recovered() -> None:
    exited = Exited(
        pid=1, exit_code=None, signal=9, out_of_memory=False, last_step=20, last_phase=Phase.DATA, farewell=None
    )
    assert not is_over(STALLED, window(links={1: LinkView("closed", 0)}))
    assert not is_over(STALLED, window(exits=(RankExit(1, 0, exited),)))
    assert is_over(STALLED, window(links={1: LinkView("connected", 0), 0: LinkView("closed", 0)}))


def test_a_rise_that_is_forgotten_has_not_come_back() -> None:
    assert is_over(RISEN, window(first_step=20))
    assert not is_over(RISEN, window(first_step=21))


def test_it_stands_while_it_is_found_or_suspected_or_its_consequences_are() -> None:
    incident = Incident(id="T-1", leading=STALLED, consequences=(SLOW,))
    suspected = Finding(
        detector="stalled_rank",
        severity="info",
        first_step=33,
        detected_step=33,
        ranks=(0,),
        summary="s",
        needs=(ExamRequest(1, "quick", (0,)),),
    )
    assert can_pass(incident)
    for found in (STALLED, SLOW, suspected, DEAD):
        assert stands(incident, [found]), found.detector
    other = finding("stalled_rank", 33, (0,), is_suspended=True)
    assert not stands(Incident(id="T-1", leading=STALLED), [other, POISONED]), "of another rank, of another kind"
