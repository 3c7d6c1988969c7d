"""What is directed, and the reason that is given for it."""

import pytest

from holter.diagnosis import rank_causes
from holter.halting import decide
from holter.records import Action, Cause, Finding, Severity


def causes(*, is_observed: bool = True) -> tuple[Cause, ...]:
    facts = {"has_nonfinite_input": is_observed, "has_nonfinite_loss": True}
    return rank_causes(
        Finding(
            detector="nonfinite_values",
            severity="critical",
            first_step=3,
            detected_step=3,
            ranks=(1,),
            summary="s",
            facts=facts,
        )
    )


def test_a_halt_that_cannot_be_carried_out_is_notified_and_says_so_plainly() -> None:
    directive = decide("critical", causes(), "halt")
    assert directive.directive == "notify"
    assert "cannot carry out" in directive.reason
    assert "training goes on" in directive.reason
    assert directive.exit_code is None


def test_what_was_not_observed_directly_would_not_halt() -> None:
    directive = decide("critical", causes(is_observed=False), "halt")
    assert directive.directive == "notify"
    assert "rests on documented" in directive.reason


@pytest.mark.parametrize(
    ("severity", "action", "expected"),
    [
        ("critical", "observe", "observe"),
        ("critical", "notify", "notify"),
        ("warning", "halt", "notify"),
        ("warning", "notify", "notify"),
        ("info", "notify", "observe"),
        ("info", "halt", "observe"),
    ],
)
def test_directives(severity: Severity, action: Action, expected: Action) -> None:
    directive = decide(severity, causes(), action)
    assert directive.directive == expected
    assert directive.reason


def test_no_cause_halts_nothing() -> None:
    assert decide("critical", (), "halt").directive == "notify"


def test_a_dead_rank_is_not_said_to_train_on() -> None:
    dead = Finding(
        detector="dead_rank",
        severity="critical",
        first_step=3,
        detected_step=3,
        ranks=(1,),
        summary="s",
        facts={"is_signal": True},
    )
    directive = decide("critical", rank_causes(dead), "halt")
    assert directive.directive == "notify"
    assert "cannot carry out" in directive.reason
    assert "training goes on" not in directive.reason
