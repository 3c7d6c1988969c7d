"""Which states a fault is in."""

import msgspec
import pytest

from holter.diagnosis import rank_causes
from holter.faults import CAUSES
from holter.halting.verdicts import Sight, decide, of_halt, of_state, spoils
from holter.records import Action, Cause, Evidence, Finding, Severity
from made_up import diagnosis


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
    assert "Non-finite input (nonfinite_input) is critical and was observed directly" == directive.reason


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


SEEN = Sight(until_step=100, compared_until=100)


def applied(step: int) -> Finding:
    return Finding(
        detector="nonfinite_values", severity="critical", first_step=step, detected_step=step, ranks=(1,), summary=""
    )


@pytest.mark.parametrize(
    ("cause", "first_step", "verdicts"),
    [
        # Of states with 29, 30 and 31 completed steps.
        ("nonfinite_input", 30, ("healthy", "healthy", "poisoned")),
        ("activation_overflow", 29, ("healthy", "poisoned", "poisoned")),
        ("silent_data_corruption", 30, ("healthy", "poisoned", "poisoned")),
        ("gradient_sync_bypassed", 30, ("healthy", "suspect", "suspect")),
        ("loss_divergence", 30, ("healthy", "suspect", "suspect")),
        ("learning_rate_too_high", 30, ("healthy", "healthy", "suspect")),
        ("rank_suspended", 0, ("healthy", "healthy", "healthy")),
        ("loss_plateau", 0, ("healthy", "healthy", "healthy")),
    ],
)
def test_a_fault_spoils_the_states_that_it_is_in(cause, first_step, verdicts):
    spoiled = spoils([], [diagnosis(cause, first_step)])
    assert verdicts == tuple(of_state(step, spoiled, SEEN).verdict for step in (29, 30, 31))
    assert verdicts == tuple(of_halt(step, spoiled).verdict for step in (29, 30, 31))


def test_it_says_why_and_where_that_is_explained():
    found = of_state(31, spoils([], [diagnosis("nonfinite_input", 30)]), SEEN)
    assert ("NaN or Inf of a batch was applied to the weights at step 30 (nonfinite_input)", "i-1") == (
        found.why,
        found.incident,
    )


def test_a_nan_that_was_applied_counts_before_and_whatever_else_leads_its_incident():
    spoiled = spoils([applied(12)], [diagnosis("learning_rate_too_high", 10)])
    assert ["healthy", "suspect", "suspect", "poisoned"] == [
        of_state(step, spoiled, SEEN).verdict for step in (10, 11, 12, 13)
    ]


def test_poison_is_worse_than_doubt():
    spoiled = spoils([], [diagnosis("uneven_clipping", 5), diagnosis("nonfinite_forward", 20)])
    assert ["suspect", "poisoned"] == [of_state(step, spoiled, SEEN).verdict for step in (10, 21)]


@pytest.mark.parametrize(
    ("cause", "verdict"), [("silent_data_corruption", "poisoned"), ("gradient_sync_bypassed", "suspect")]
)
def test_what_only_a_comparison_shows_may_be_as_old_as_the_last_that_was_equal(cause, verdict):
    spoiled = spoils([], [diagnosis(cause, 90, agreed_steps=65)])
    assert ["healthy", verdict, verdict] == [of_state(step, spoiled, SEEN).verdict for step in (65, 66, 90)]
    assert ["healthy", verdict] == [of_halt(step, spoiled).verdict for step in (65, 66)]
    assert "found at step 90; replicas were last found equal after 65 steps" in of_state(66, spoiled, SEEN).why
    assert 0 == spoils([], [diagnosis(cause, 90, agreed_steps=-1)])[0].first_bad
    # Seen as it happened, though the comparison came later.
    assert 30 == spoils([], [diagnosis(cause, 30, agreed_steps=65)])[0].first_bad


def test_a_state_is_not_called_healthy_before_its_replicas_were_compared():
    found = of_state(100, [], Sight(until_step=101, compared_until=65))
    assert ("unknown", "replicas were last found equal after 65 steps, and not since") == (found.verdict, found.why)
    assert "healthy" == of_state(100, [], Sight(until_step=129, compared_until=129)).verdict
    alone = of_state(100, [], Sight(until_step=101))
    assert ("healthy", True) == (alone.verdict, alone.why.endswith("; no replicas were compared"))


def test_a_halt_says_until_when_replicas_were_seen_equal():
    found = of_halt(100, [], 65)
    assert ("healthy", "nothing had spoiled it by step 100; replicas were last found equal after 65 steps") == (
        found.verdict,
        found.why,
    )
    assert "nothing had spoiled it by step 65" == of_halt(65, [], 65).why


POISONED = [
    "activation_overflow",
    "corrupted_collective",
    "frozen_component_uninitialised",
    "nonfinite_backward",
    "nonfinite_forward",
    "nonfinite_input",
    "silent_data_corruption",
]
SUSPECT = [
    "average_not_tracking",
    "clip_on_local_shard",
    "codebook_collapse",
    "collective_dtype_mismatch",
    "collective_order_mismatch",
    "collective_shape_mismatch",
    "corrupt_labels_or_range",
    "dead_activations",
    "degenerate_outputs",
    "dtype_changed",
    "dtype_mismatch_across_ranks",
    "entropy_collapse",
    "entropy_explosion",
    "exploding_gradients",
    "frozen_component_changed",
    "frozen_component_mismatch",
    "frozen_set_mismatch",
    "gradient_sync_bypassed",
    "gradients_never_cleared",
    "hidden_nonfinite_loss",
    "implausible_initialisation",
    "kl_sign_flipped",
    "learning_rate_too_high",
    "loss_divergence",
    "lost_buffer",
    "model_structure_mismatch",
    "nondeterministic_drift",
    "nonfinite_loss_function",
    "optimizer_state_mismatch",
    "parallel_input_mismatch",
    "precision_round_trip",
    "reward_collapse",
    "uneven_clipping",
    "unfrozen_by_mistake",
    "unreduced_parameters",
    "unsynced_initialisation",
    "wrong_weights_loaded",
]


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_the_table_of_causes_and_verdicts(cause: str) -> None:
    """Each row of docs/verdicts.md. A new cause that spoils numbers is written into one of the lists above."""
    expected = "poisoned" if cause in POISONED else "suspect" if cause in SUSPECT else "healthy"
    spoiled = spoils([], [diagnosis(cause, 30)])
    before, with_it = of_state(29, spoiled, SEEN), of_state(31, spoiled, SEEN)
    assert ("healthy", expected) == (before.verdict, with_it.verdict)
    if expected != "healthy":
        assert ("i-1", True) == (with_it.incident, f"({cause})" in with_it.why)


def test_a_loss_that_left_its_course_counts_whatever_led_to_it() -> None:
    values = {"cause": "loss_divergence", "severity": "warning", "first_step": 25, "detector": "loss_trend"}
    made = diagnosis("kl_inactive", 3)
    rose = Evidence(kind="consequence", summary="s", values=values)
    made = msgspec.structs.replace(made, causes=(msgspec.structs.replace(made.causes[0], evidence=(rose,)),))
    found = [of_state(step, spoils([], [made]), SEEN) for step in (24, 25)]
    assert ["healthy", "suspect"] == [one.verdict for one in found]
    assert "the loss had left its course, since step 25 (loss_divergence)" == found[1].why


def test_what_has_passed_speaks_against_nothing_and_poison_stays() -> None:
    for cause, expected in (("loss_divergence", "healthy"), ("nonfinite_input", "poisoned")):
        over = msgspec.structs.replace(diagnosis(cause, 3), closed_at="2026-11-18T00:00:00Z")
        assert expected == of_state(30, spoils([], [over]), SEEN).verdict


def test_information_spoils_nothing():
    assert [] == spoils([], [diagnosis("nonfinite_input", 3, severity="info")])


def test_what_was_not_seen_is_not_called_healthy():
    assert "unknown" == of_state(30, [], Sight(until_step=29)).verdict
    blind = of_state(30, [], Sight(until_step=30, blind=("rank 1 on node-7: its sidecar is gone",)))
    assert ("unknown", "not all was seen: rank 1 on node-7: its sidecar is gone") == (blind.verdict, blind.why)
    assert "healthy" == of_state(30, [], Sight(until_step=30)).verdict
    assert "healthy" == of_halt(30, []).verdict
