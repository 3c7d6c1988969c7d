"""The differential of ranks that part and of frozen components: which cause leads for which facts."""

from typing import Any

import pytest

from holter.diagnosis import rank_causes
from holter.records import Finding


def finding(detector: str, **facts: Any) -> Finding:
    known = {"compared_ranks": [0, 1], "parameter_tensors": ["p.weight"], "gradient_tensors": ["g.weight"]}
    return Finding(
        detector=detector,
        severity="critical",
        first_step=24,
        detected_step=24,
        ranks=(1,),
        tensors=("t.weight",),
        summary="s",
        facts=known | facts,
    )


PARTED = {"parameters_differ": True, "parameters_differ_at_first": False}
AGREE = {
    "gradients_differ": False,
    "gradients_differ_always": False,
    "gradients_differ_ever_since": False,
    "gradients_differ_once": False,
    "given_gradients_differ": False,
    "hyperparameters_differ": False,
    "optimizer_state_differs": False,
    "is_reduction_seen": True,
}
SINCE = AGREE | {
    "gradients_differ": True,
    "gradients_differ_ever_since": True,
    "gradients_differ_repeatedly": True,
    "gradients_differ_in_all_tensors": True,
}
FIRST = SINCE | {"gradients_differ_ever_since": False, "gradients_differ_repeatedly": False}
FEW = {"gradients_differ_in_all_tensors": False}


@pytest.mark.parametrize(
    ("expected", "confidence", "facts"),
    [
        ("gradient_sync_bypassed", 0.93, SINCE),
        ("gradient_sync_bypassed", 0.65, FIRST),
        ("unreduced_parameters", 0.93, SINCE | FEW),
        ("unreduced_parameters", 0.93, SINCE | {"has_unused_parameter": True}),
        ("unreduced_parameters", 0.90, FIRST | FEW | {"were_frozen_before": True}),
        ("unreduced_parameters", 0.60, FIRST | FEW),
        ("corrupted_collective", 0.90, FIRST | {"gradients_differ_once": True}),
        ("corrupted_collective", 0.90, FIRST | FEW | {"gradients_differ_once": True}),
        ("uneven_clipping", 0.95, AGREE | {"given_gradients_differ": True}),
        ("optimizer_state_mismatch", 0.85, AGREE | {"given_gradients_differ": True, "loss_scales_differ": True}),
        ("optimizer_state_mismatch", 0.93, AGREE | {"hyperparameters_differ": True}),
        ("optimizer_state_mismatch", 0.90, AGREE | {"optimizer_state_differs": True}),
        ("nondeterministic_drift", 0.85, SINCE | {"is_distance_tiny": True}),
        ("nondeterministic_drift", 0.65, AGREE | {"is_distance_tiny": True, "parameters_differ_in_all_tensors": True}),
        ("precision_round_trip", 0.93, AGREE | {"parameters_differ_at_first": True, "is_one_side_rounded": True}),
        ("unsynced_initialisation", 0.95, AGREE | {"parameters_differ_at_first": True, "is_distance_tiny": True}),
        ("silent_data_corruption", 0.60, AGREE | {"parameters_differ_in_all_tensors": False}),
    ],
)
def test_why_replicas_parted(expected: str, confidence: float, facts: dict[str, Any]) -> None:
    first = rank_causes(finding("replica_divergence", **PARTED | facts))[0]
    assert (expected, confidence) == (first.cause, first.confidence)


@pytest.mark.parametrize(
    ("expected", "detector", "facts"),
    [
        ("frozen_set_mismatch", "structure_mismatch", {"are_frozen_sets_different": True}),
        ("dtype_mismatch_across_ranks", "structure_mismatch", {"are_dtypes_different": True}),
        (
            "model_structure_mismatch",
            "structure_mismatch",
            {"is_structure_different": True, "are_frozen_sets_different": True, "are_dtypes_different": True},
        ),
        ("frozen_component_uninitialised", "frozen_divergence", {"is_implausible": True}),
        ("precision_round_trip", "frozen_divergence", {"is_one_side_rounded": True}),
        ("frozen_component_mismatch", "frozen_divergence", {}),
        (
            "silent_data_corruption",
            "frozen_divergence",
            {"did_agree_before": True, "own_history_broke_on_some": True},
        ),
        ("frozen_component_changed", "frozen_movement", {"is_moved_in_step": True, "is_held_by_optimizer": True}),
    ],
)
def test_why_structure_or_what_is_frozen_is_wrong(expected: str, detector: str, facts: dict[str, Any]) -> None:
    looked = {
        "is_structure_different": False,
        "are_frozen_sets_different": False,
        "are_dtypes_different": False,
        "is_implausible": False,
        "is_one_side_rounded": False,
        "did_agree_before": False,
        "is_moved_in_step": False,
    }
    assert rank_causes(finding(detector, **looked | facts))[0].cause == expected


def test_a_cause_with_a_culprit_names_it_and_the_others_name_everyone() -> None:
    clipped = rank_causes(finding("replica_divergence", **PARTED | AGREE | {"given_gradients_differ": True}))[0]
    assert (clipped.ranks, clipped.tensors) == ((1,), ("t.weight",))
    unreduced = rank_causes(finding("replica_divergence", **PARTED | SINCE | FEW))[0]
    assert (unreduced.ranks, unreduced.tensors) == ((0, 1), ("g.weight",))
