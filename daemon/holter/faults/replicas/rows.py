"""Why ranks that should be equal are not."""

from holter.faults.row import Row

_NO_TIE_BREAK = (
    "something to tell the sound side from the damaged one: the ranks' own history across this step, a third replica, or a "
    "checkpoint with fingerprints; without it all ranks that differ are named"
)
_NO_TABLES = "the ranks' tables of fingerprints, to tell all tensors from a few"
_NO_GRADIENTS = "a comparison of the reduced gradients"
_NO_PARAMETERS = "a comparison of the parameters at the start"
_NO_STATE = "the optimizers' learning rates, step counts and states, compared between ranks"
_NO_SECOND = "a second comparison: gradients that differ once are a faulty collective, ever since they are not reduced"
_NO_REDUCED = "the gradients as the reduction left them: parameters outside the reducer and a clip that not all ranks apply look alike here"
_NO_MOMENT = "a comparison of gradients and moments at the very step at which the weights parted"
_NO_DISTANCE = "how the distance between the ranks grows over the next comparisons"

ROWS: tuple[Row, ...] = (
    # replica_divergence: equal at first? do the reduced gradients agree? all tensors or a few? whose history broke?
    # Different from the start.
    Row("unsynced_initialisation", "replica_divergence", 0.95, "observation", seen=("parameters_differ_at_first",), absent=("gradients_differ",), unless=("own_history_broke_on_some", "is_one_side_rounded"), names="everyone", tensors="parameters"),
    Row("unsynced_initialisation", "replica_divergence", 0.85, "documented", seen=("parameters_differ_at_first", "gradients_differ"), unless=("own_history_broke_on_some", "is_one_side_rounded"), names="everyone", tensors="parameters"),
    Row("unsynced_initialisation", "replica_divergence", 0.80, "documented", seen=("parameters_differ_at_first",), unknown=("gradients_differ",), unless=("own_history_broke_on_some", "is_one_side_rounded"), names="everyone", tensors="parameters"),
    Row("unsynced_initialisation", "replica_divergence", 0.40, "inference", seen=("parameters_differ_at_first",), names="everyone", tensors="parameters", missing=_NO_TIE_BREAK),
    Row("unsynced_initialisation", "replica_divergence", 0.40, "inference", seen=("parameters_differ",), unknown=("parameters_differ_at_first",), unless=("gradients_differ",), names="everyone", tensors="parameters", missing=_NO_PARAMETERS),
    # The same weights, but on one side without their low bits.
    Row("precision_round_trip", "replica_divergence", 0.93, "observation", seen=("is_one_side_rounded",), unless=("gradients_differ",), tensors="parameters"),
    Row("precision_round_trip", "replica_divergence", 0.55, "inference", seen=("is_one_side_rounded",), tensors="parameters", missing="why the gradients differ as well: rounded weights alone leave the reduced gradients equal"),
    # Gradients that nobody reduced. Parameters that differ as well are what it leads to.
    Row("gradient_sync_bypassed", "replica_divergence", 0.95, "observation", seen=("gradients_differ_always", "gradients_differ_in_all_tensors", "gradients_differ_repeatedly"), absent=("parameters_differ_at_first",), unless=("has_unused_parameter", "is_distance_tiny"), names="everyone", tensors="gradients"),
    Row("gradient_sync_bypassed", "replica_divergence", 0.90, "observation", seen=("gradients_differ_always", "gradients_differ_in_all_tensors"), unless=("has_unused_parameter", "is_distance_tiny"), names="everyone", tensors="gradients"),
    Row("gradient_sync_bypassed", "replica_divergence", 0.93, "observation", seen=("gradients_differ_ever_since", "gradients_differ_in_all_tensors"), unless=("has_unused_parameter", "is_distance_tiny"), names="everyone", tensors="gradients"),
    Row("gradient_sync_bypassed", "replica_divergence", 0.65, "inference", seen=("gradients_differ", "gradients_differ_in_all_tensors"), unless=("has_unused_parameter", "is_distance_tiny", "gradients_differ_once"), names="everyone", tensors="gradients", missing=_NO_SECOND),
    Row("gradient_sync_bypassed", "replica_divergence", 0.65, "inference", seen=("gradients_differ_always",), unknown=("gradients_differ_in_all_tensors",), names="everyone", tensors="gradients", missing=_NO_TABLES),
    Row("gradient_sync_bypassed", "replica_divergence", 0.30, "inference", seen=("gradients_differ",), names="everyone", tensors="gradients", missing=_NO_TABLES),
    # Some gradients that nobody reduced.
    Row("unreduced_parameters", "replica_divergence", 0.93, "observation", seen=("gradients_differ_ever_since", "is_reduction_seen"), absent=("gradients_differ_in_all_tensors",), unless=("is_distance_tiny",), names="everyone", tensors="gradients"),
    Row("unreduced_parameters", "replica_divergence", 0.93, "observation", seen=("gradients_differ", "has_unused_parameter"), unless=("is_distance_tiny", "gradients_differ_once"), names="everyone", tensors="gradients"),
    Row("unreduced_parameters", "replica_divergence", 0.90, "observation", seen=("gradients_differ", "were_frozen_before"), unless=("is_distance_tiny", "gradients_differ_once"), names="everyone", tensors="gradients"),
    Row("unreduced_parameters", "replica_divergence", 0.85, "documented", seen=("gradients_differ_always",), absent=("gradients_differ_in_all_tensors",), unless=("is_distance_tiny",), names="everyone", tensors="gradients"),
    Row("unreduced_parameters", "replica_divergence", 0.80, "documented", seen=("gradients_differ_ever_since",), absent=("gradients_differ_in_all_tensors",), unless=("is_distance_tiny",), names="everyone", tensors="gradients"),
    Row("unreduced_parameters", "replica_divergence", 0.60, "inference", seen=("gradients_differ",), absent=("gradients_differ_in_all_tensors",), unless=("is_distance_tiny", "gradients_differ_once"), names="everyone", tensors="gradients", missing=_NO_SECOND),
    # Gradients that agree after the reduction and not when the optimizer gets them.
    Row("uneven_clipping", "replica_divergence", 0.95, "observation", seen=("given_gradients_differ",), absent=("gradients_differ",), unless=("loss_scales_differ", "is_distance_tiny")),
    Row("uneven_clipping", "replica_divergence", 0.60, "inference", seen=("given_gradients_differ",), missing="whether the loss scalers of the ranks agree: gradients that are unscaled by other factors differ in the same way"),
    Row("uneven_clipping", "replica_divergence", 0.40, "inference", seen=("gradients_differ",), absent=("gradients_differ_in_all_tensors",), unless=("is_reduction_seen",), missing=_NO_REDUCED),
    # Equal gradients, another optimizer.
    Row("optimizer_state_mismatch", "replica_divergence", 0.93, "observation", seen=("hyperparameters_differ",), absent=("gradients_differ",), unless=("given_gradients_differ",)),
    Row("optimizer_state_mismatch", "replica_divergence", 0.90, "observation", seen=("optimizer_state_differs",), absent=("gradients_differ",), unless=("given_gradients_differ", "parameters_differ_at_first")),
    Row("optimizer_state_mismatch", "replica_divergence", 0.85, "documented", seen=("loss_scales_differ", "given_gradients_differ"), absent=("gradients_differ",)),
    Row("optimizer_state_mismatch", "replica_divergence", 0.80, "documented", seen=("hyperparameters_differ",), unknown=("gradients_differ",)),
    Row("optimizer_state_mismatch", "replica_divergence", 0.50, "inference", seen=("hyperparameters_differ",), missing="whether gradients differed before the settings did: then the settings are not the beginning"),
    Row("optimizer_state_mismatch", "replica_divergence", 0.45, "inference", seen=("parameters_parted_within_a_step",), absent=("gradients_differ", "parameters_differ_at_first"), missing=_NO_STATE),
    # Equal gradients whenever anyone looked, but moments that are not: a gradient that differed between two looks, or the moments themselves.
    Row("optimizer_state_mismatch", "replica_divergence", 0.62, "inference", seen=("state_parted_with_weights", "parameters_differ_in_all_tensors"), absent=("gradients_differ", "parameters_differ_at_first"), unless=("given_gradients_differ", "is_distance_tiny", "own_history_broke_on_some"), missing=_NO_MOMENT),
    Row("corrupted_collective", "replica_divergence", 0.70, "inference", seen=("state_parted_with_weights",), absent=("gradients_differ", "parameters_differ_at_first", "parameters_differ_in_all_tensors"), unless=("given_gradients_differ", "own_history_broke_on_some", "hyperparameters_differ", "optimizer_state_differs"), tensors="parameters", missing=_NO_MOMENT),
    # One bad delivery.
    Row("corrupted_collective", "replica_divergence", 0.90, "observation", seen=("gradients_differ_once", "parameters_differ"), absent=("parameters_differ_at_first",), unless=("own_history_broke_on_some",), tensors="gradients"),
    Row("corrupted_collective", "replica_divergence", 0.80, "documented", seen=("gradients_differ_once",), absent=("parameters_differ_at_first",), tensors="gradients"),
    Row("corrupted_collective", "replica_divergence", 0.50, "inference", seen=("gradients_differ",), absent=("gradients_differ_always", "gradients_differ_ever_since"), tensors="gradients", missing=_NO_SECOND),
    Row("corrupted_collective", "replica_divergence", 0.30, "inference", absent=("parameters_differ_at_first", "gradients_differ"), unless=("own_history_broke_on_some", "hyperparameters_differ", "given_gradients_differ"), tensors="parameters", missing="a comparison of the gradients at the very step at which the weights parted"),
    # Rounding, and nothing else.
    Row("nondeterministic_drift", "replica_divergence", 0.85, "documented", seen=("is_distance_tiny", "gradients_differ_repeatedly"), absent=("parameters_differ_at_first",), unless=("is_one_side_rounded",), names="everyone", tensors="gradients"),
    Row("nondeterministic_drift", "replica_divergence", 0.80, "documented", seen=("is_distance_tiny", "given_gradients_differ"), absent=("parameters_differ_at_first", "gradients_differ"), unless=("is_one_side_rounded",), names="everyone", tensors="gradients"),
    Row("nondeterministic_drift", "replica_divergence", 0.68, "inference", seen=("is_distance_tiny", "gradients_differ"), absent=("parameters_differ_at_first",), unless=("is_one_side_rounded",), names="everyone", tensors="gradients", missing=_NO_DISTANCE),
    Row("nondeterministic_drift", "replica_divergence", 0.65, "inference", seen=("is_distance_tiny", "parameters_differ_in_all_tensors"), absent=("parameters_differ_at_first", "gradients_differ"), unless=("is_one_side_rounded", "hyperparameters_differ", "optimizer_state_differs", "given_gradients_differ", "own_history_broke_on_some"), names="everyone", tensors="parameters", missing=_NO_DISTANCE),
    # Weights that changed by themselves.
    Row("silent_data_corruption", "replica_divergence", 0.93, "observation", seen=("own_history_broke_on_some",), absent=("gradients_differ", "parameters_differ_in_all_tensors"), unless=("given_gradients_differ", "hyperparameters_differ"), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.85, "documented", seen=("own_history_broke_on_some",), unless=("gradients_differ", "parameters_differ_in_all_tensors"), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.80, "documented", seen=("own_history_broke_on_some",), absent=("gradients_differ",), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.75, "documented", seen=("own_history_broke_on_some",), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.80, "documented", seen=("is_culprit_known",), absent=("parameters_differ_at_first", "gradients_differ", "parameters_differ_in_all_tensors"), unless=("parameters_parted_within_a_step", "given_gradients_differ", "hyperparameters_differ", "optimizer_state_differs"), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.60, "inference", absent=("parameters_differ_at_first", "gradients_differ", "parameters_differ_in_all_tensors"), unless=("parameters_parted_within_a_step", "given_gradients_differ", "hyperparameters_differ", "optimizer_state_differs"), tensors="parameters", missing=_NO_TIE_BREAK),
    Row("silent_data_corruption", "replica_divergence", 0.50, "inference", seen=("parameters_parted_within_a_step",), absent=("parameters_differ_at_first", "gradients_differ"), unless=("given_gradients_differ", "hyperparameters_differ", "optimizer_state_differs"), tensors="parameters", missing=_NO_STATE),
    Row("silent_data_corruption", "replica_divergence", 0.45, "inference", seen=("parameters_differ",), absent=("parameters_differ_at_first",), unless=("gradients_differ", "given_gradients_differ", "hyperparameters_differ", "optimizer_state_differs"), tensors="parameters", missing=_NO_GRADIENTS + ", and " + _NO_TABLES),
    Row("silent_data_corruption", "replica_divergence", 0.45, "inference", seen=("gradients_differ",), absent=("gradients_differ_always", "gradients_differ_ever_since"), missing="the collective's result on each rank: gradients differed at some steps and agreed at others"),
    Row("silent_data_corruption", "replica_divergence", 0.10, "inference", missing=_NO_TIE_BREAK),
    # buffer_divergence: only the buffers?
    Row("buffer_divergence", "buffer_divergence", 0.93, "observation", seen=("buffers_differ_repeatedly",), absent=("parameters_differ",)),
    Row("buffer_divergence", "buffer_divergence", 0.80, "documented", seen=("buffers_differ_repeatedly",), unless=("parameters_differ",)),
    Row("buffer_divergence", "buffer_divergence", 0.60, "inference", missing="a comparison of the parameters, and a second one of the buffers"),
    # structure_mismatch: names and shapes, frozenness, or dtypes?
    Row("model_structure_mismatch", "structure_mismatch", 0.95, "observation", seen=("is_structure_different",)),
    Row("model_structure_mismatch", "structure_mismatch", 0.10, "inference", missing="a census of every rank"),
    # shard_clipping
    Row("clip_on_local_shard", "shard_clipping", 0.93, "observation", seen=("is_limit_exceeded", "is_sharded_everywhere")),
    Row("clip_on_local_shard", "shard_clipping", 0.50, "inference", missing="whether what was clipped is a shard on every rank"),
)  # fmt: skip
