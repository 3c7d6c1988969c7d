"""Why ranks that should be equal are not."""

from holter.diagnosis.rows.row import Row

_NO_TIE_BREAK = (
    "something to tell the sound side from the damaged one: the ranks' own history across this step, a third replica, or a "
    "checkpoint with fingerprints; without it all ranks that differ are named"
)
_NO_TABLES = "the ranks' tables of fingerprints, to tell all tensors from a few"
_NO_GRADIENTS = "a comparison of the reduced gradients"
_NO_PARAMETERS = "a comparison of the parameters at the start"
_NO_STATE = "the optimizers' learning rates, step counts and states, compared between ranks"
_FEW_GRADIENTS = "why only some gradients differ: parameters outside the reducer, a clip that not all ranks apply, and a faulty collective look alike here"

ROWS: tuple[Row, ...] = (
    # replica_divergence: equal at first? do the reduced gradients agree? all tensors or a few? whose history broke?
    # Different from the start.
    Row("unsynced_initialisation", "replica_divergence", 0.95, "observation", seen=("parameters_differ_at_first",), absent=("gradients_differ",), unless=("own_history_broke_on_some",), names="everyone", tensors="parameters"),
    Row("unsynced_initialisation", "replica_divergence", 0.85, "documented", seen=("parameters_differ_at_first", "gradients_differ"), unless=("own_history_broke_on_some",), names="everyone", tensors="parameters"),
    Row("unsynced_initialisation", "replica_divergence", 0.80, "documented", seen=("parameters_differ_at_first",), unknown=("gradients_differ",), unless=("own_history_broke_on_some",), names="everyone", tensors="parameters"),
    Row("unsynced_initialisation", "replica_divergence", 0.40, "inference", seen=("parameters_differ_at_first",), names="everyone", tensors="parameters", missing=_NO_TIE_BREAK),
    Row("unsynced_initialisation", "replica_divergence", 0.40, "inference", seen=("parameters_differ",), unknown=("parameters_differ_at_first",), unless=("gradients_differ",), names="everyone", tensors="parameters", missing=_NO_PARAMETERS),
    # Gradients that nobody reduced. Parameters that differ as well are what it leads to.
    Row("gradient_sync_bypassed", "replica_divergence", 0.95, "observation", seen=("gradients_differ_always", "gradients_differ_in_all_tensors", "gradients_differ_repeatedly"), absent=("parameters_differ_at_first",), names="everyone", tensors="gradients"),
    Row("gradient_sync_bypassed", "replica_divergence", 0.90, "observation", seen=("gradients_differ_always", "gradients_differ_in_all_tensors"), names="everyone", tensors="gradients"),
    Row("gradient_sync_bypassed", "replica_divergence", 0.65, "inference", seen=("gradients_differ_always",), unknown=("gradients_differ_in_all_tensors",), names="everyone", tensors="gradients", missing=_NO_TABLES),
    Row("gradient_sync_bypassed", "replica_divergence", 0.40, "inference", seen=("gradients_differ",), names="everyone", tensors="gradients", missing=_FEW_GRADIENTS),
    # Weights that changed by themselves.
    Row("silent_data_corruption", "replica_divergence", 0.93, "observation", seen=("own_history_broke_on_some",), absent=("gradients_differ", "parameters_differ_in_all_tensors"), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.85, "documented", seen=("own_history_broke_on_some",), unless=("gradients_differ", "parameters_differ_in_all_tensors"), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.80, "documented", seen=("own_history_broke_on_some",), absent=("gradients_differ",), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.75, "documented", seen=("own_history_broke_on_some",), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.80, "documented", seen=("is_culprit_known",), absent=("parameters_differ_at_first", "gradients_differ", "parameters_differ_in_all_tensors"), unless=("parameters_parted_within_a_step",), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.60, "inference", absent=("parameters_differ_at_first", "gradients_differ", "parameters_differ_in_all_tensors"), unless=("parameters_parted_within_a_step",), tensors="parameters", missing=_NO_TIE_BREAK),
    Row("silent_data_corruption", "replica_divergence", 0.50, "inference", seen=("parameters_parted_within_a_step",), absent=("parameters_differ_at_first", "gradients_differ"), tensors="parameters", missing=_NO_STATE),
    Row("silent_data_corruption", "replica_divergence", 0.45, "inference", seen=("parameters_differ",), absent=("parameters_differ_at_first",), unless=("gradients_differ",), tensors="parameters", missing=_NO_GRADIENTS + ", and " + _NO_TABLES),
    Row("silent_data_corruption", "replica_divergence", 0.45, "inference", seen=("gradients_differ",), absent=("gradients_differ_always",), missing="the collective's result on each rank: gradients differed at some steps and agreed at others"),
    Row("silent_data_corruption", "replica_divergence", 0.10, "inference", missing=_NO_TIE_BREAK),
)  # fmt: skip
