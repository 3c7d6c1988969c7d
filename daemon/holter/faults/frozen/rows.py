"""Why a component that should not move does, or was never right."""

from holter.faults.row import Row

_NO_SOURCE = "where each rank's copy was loaded from: without a third replica or a checkpoint with fingerprints both sides look right"
_NO_WRITER = "what wrote to the tensors: no step of an optimizer did"

ROWS: tuple[Row, ...] = (
    # structure_mismatch: the same names and shapes, but not the same frozen ones, or not the same dtypes.
    Row("frozen_set_mismatch", "structure_mismatch", 0.95, "observation", seen=("are_frozen_sets_different",), absent=("is_structure_different",)),
    Row("frozen_set_mismatch", "structure_mismatch", 0.60, "inference", seen=("are_frozen_sets_different", "is_structure_different"), missing="a model of the same structure on all ranks, to compare what is frozen in it"),
    Row("dtype_mismatch_across_ranks", "structure_mismatch", 0.95, "observation", seen=("are_dtypes_different",), absent=("is_structure_different", "are_frozen_sets_different")),
    Row("dtype_mismatch_across_ranks", "structure_mismatch", 0.60, "inference", seen=("are_dtypes_different",), missing="whether the other difference brought this one about"),
    Row("dtype_mismatch_across_ranks", "frozen_divergence", 0.95, "observation", seen=("are_dtypes_different",), absent=("is_implausible",)),
    # frozen_divergence: is one side implausible? did they agree before? whose past broke?
    Row("frozen_component_uninitialised", "frozen_divergence", 0.95, "observation", seen=("is_implausible",), unless=("did_agree_before",)),
    Row("frozen_component_uninitialised", "frozen_divergence", 0.75, "documented", seen=("is_implausible", "did_agree_before")),
    Row("precision_round_trip", "frozen_divergence", 0.93, "observation", seen=("is_one_side_rounded",), absent=("is_implausible",), unless=("are_dtypes_different",)),
    Row("silent_data_corruption", "frozen_divergence", 0.85, "documented", seen=("own_history_broke_on_some", "did_agree_before")),
    Row("silent_data_corruption", "frozen_divergence", 0.50, "inference", seen=("did_agree_before",), missing="the tensors' fingerprints from before, on both sides"),
    Row("frozen_component_mismatch", "frozen_divergence", 0.90, "observation", absent=("is_implausible", "is_one_side_rounded", "did_agree_before"), unless=("are_dtypes_different",)),
    Row("frozen_component_mismatch", "frozen_divergence", 0.60, "inference", absent=("is_implausible",), missing=_NO_SOURCE),
    Row("frozen_component_mismatch", "frozen_divergence", 0.15, "inference", missing=_NO_SOURCE),
    # frozen_movement: within a step of an optimizer, or outside?
    Row("frozen_component_changed", "frozen_movement", 0.93, "observation", seen=("is_moved_in_step", "is_held_by_optimizer")),
    Row("frozen_component_changed", "frozen_movement", 0.75, "documented", seen=("was_still_before",), absent=("is_moved_in_step",)),
    Row("frozen_component_changed", "frozen_movement", 0.50, "inference", missing=_NO_WRITER),
    # declared_frozen
    Row("unfrozen_by_mistake", "declared_frozen", 0.95, "observation", seen=("is_held_by_optimizer",)),
    Row("unfrozen_by_mistake", "declared_frozen", 0.60, "inference", missing="whether an optimizer holds the declared parameters"),
)  # fmt: skip
