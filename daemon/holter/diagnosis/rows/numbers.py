"""What a NaN, and a loss that goes wrong, can come from."""

from holter.diagnosis.rows.row import Row

_NO_LOCAL_VIEW = (
    "gradients from before the reduction: the framework did not show them, so the rank that made the NaN is not known"
)
_NO_REPLAY = "a replay of the step's batch, to name the module"

ROWS: tuple[Row, ...] = (
    # nonfinite_values: where was it first, before the reduction?
    Row("nonfinite_input", "nonfinite_values", 0.93, "observation", seen=("has_nonfinite_input", "has_nonfinite_loss")),
    Row("nonfinite_input", "nonfinite_values", 0.85, "observation", seen=("has_nonfinite_input",), absent=("has_nonfinite_loss",)),
    Row("nonfinite_input", "nonfinite_values", 0.60, "inference", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input", "is_origin_input_finite"), missing="the batch as the model got it: it was finite as it came, but a replay met a module whose input was not"),
    Row("nonfinite_forward", "nonfinite_values", 0.95, "observation", seen=("has_nonfinite_loss", "has_origin_module", "is_origin_input_finite"), absent=("has_nonfinite_input",)),
    Row("nonfinite_forward", "nonfinite_values", 0.85, "documented", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input",), unless=("has_origin_module",)),
    Row("nonfinite_forward", "nonfinite_values", 0.50, "inference", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input",), missing=_NO_REPLAY + " that starts from finite inputs"),
    Row("nonfinite_backward", "nonfinite_values", 0.93, "observation", seen=("has_nonfinite_gradient", "is_local_view"), absent=("has_nonfinite_input", "has_nonfinite_loss")),
    Row("nonfinite_backward", "nonfinite_values", 0.60, "inference", absent=("has_nonfinite_input", "has_nonfinite_loss"), unless=("is_local_view",), missing=_NO_LOCAL_VIEW),
    Row("nonfinite_backward", "nonfinite_values", 0.15, "inference", missing=_NO_REPLAY),
)  # fmt: skip
