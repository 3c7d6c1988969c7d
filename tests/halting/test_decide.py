"""What is directed, and the reason that is given for it."""

import pytest

from holter.diagnosis import rank_causes
from holter.halting.decide import decide
from holter.records import Action, Cause, Evidence, Finding, Severity


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


def test_a_critical_cause_that_was_observed_halts_and_says_why() -> None:
    directive = decide("critical", causes(), "halt", detector="nonfinite_values")
    assert ("halt", 93) == (directive.directive, directive.exit_code)
    assert "nonfinite_input is critical and was observed directly" == directive.reason


@pytest.mark.parametrize("action", ["observe", "notify"])
def test_what_would_have_happened_is_said_where_nothing_is_halted(action: Action) -> None:
    assert "with halt it would be halted" in decide("critical", causes(), action).reason
    assert "with halt it would be halted" not in decide("warning", causes(), action).reason


def test_a_detector_on_trial_halts_nothing() -> None:
    directive = decide("critical", causes(), "halt", detector="kl_term")
    assert "notify" == directive.directive
    assert "kl_term is on trial" in directive.reason


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


def dead(**how: object) -> tuple[Cause, ...]:
    evidence = Evidence(kind="process_exit", summary="s", values={"signal": None, "farewell": None} | how)
    return rank_causes(
        Finding(
            detector="dead_rank",
            severity="critical",
            first_step=3,
            detected_step=3,
            ranks=(1,),
            summary="s",
            facts={"is_signal": bool(how.get("signal")), "is_status_known": True, "is_exception": "signal" not in how},
            evidence=(evidence,),
        )
    )


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"signal": "SIGKILL"}, "halt"),
        ({"farewell": "os._exit(7)", "signal": None}, "halt"),
        ({"farewell": "KeyError: 'sample-17'"}, "notify"),
    ],
)
def test_survivors_of_a_dead_rank_are_saved_and_an_error_of_the_scripts_own_takes_its_course(
    how: dict[str, object], expected: Action
) -> None:
    assert expected == decide("critical", dead(**how), "halt", detector="dead_rank").directive
