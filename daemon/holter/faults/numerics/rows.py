"""What a NaN, and a loss that goes wrong, can come from."""

from holter.faults.row import Row

_NO_LOCAL_VIEW = (
    "gradients from before the reduction: the framework did not show them, so the rank that made the NaN is not known"
)
_NO_REPLAY = "a replay of the step's batch, to name the module"
_NOT_LOGGED = "what the script's logger showed at these steps, and the gradients: whether anybody could have seen it"
_NO_CAUSE = "what set it off: data, schedule and resumed state of the steps before were not seen to change"

ROWS: tuple[Row, ...] = (
    # nonfinite_values: where was it first, before the reduction?
    Row("nonfinite_input", "nonfinite_values", 0.93, "observation", seen=("has_nonfinite_input", "has_nonfinite_loss")),
    Row("nonfinite_input", "nonfinite_values", 0.85, "observation", seen=("has_nonfinite_input",), absent=("has_nonfinite_loss",)),
    Row("nonfinite_input", "nonfinite_values", 0.60, "inference", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input", "is_origin_input_finite"), missing="the batch as the model got it: it was finite as it came, but a replay met a module whose input was not"),
    Row("activation_overflow", "nonfinite_values", 0.93, "observation", seen=("is_overflow", "has_nonfinite_loss", "has_origin_module", "is_origin_input_finite"), absent=("has_nonfinite_input",)),
    Row("activation_overflow", "nonfinite_values", 0.90, "observation", seen=("is_overflow", "has_origin_module", "is_origin_input_finite"), absent=("has_nonfinite_input", "has_nonfinite_loss")),
    Row("nonfinite_forward", "nonfinite_values", 0.95, "observation", seen=("has_nonfinite_loss", "has_origin_module", "is_origin_input_finite"), absent=("has_nonfinite_input",), unless=("is_overflow",)),
    Row("nonfinite_forward", "nonfinite_values", 0.85, "documented", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input",), unless=("has_origin_module",)),
    Row("nonfinite_forward", "nonfinite_values", 0.50, "inference", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input",), missing=_NO_REPLAY + " that starts from finite inputs"),
    Row("nonfinite_backward", "nonfinite_values", 0.93, "observation", seen=("has_nonfinite_gradient", "is_local_view"), absent=("has_nonfinite_input", "has_nonfinite_loss"), unless=("is_overflow",)),
    Row("nonfinite_backward", "nonfinite_values", 0.40, "inference", seen=("is_overflow",), absent=("has_nonfinite_input", "has_nonfinite_loss"), missing="the backward pass of that module alone: the overflow before it explains the gradients already"),
    Row("nonfinite_backward", "nonfinite_values", 0.60, "inference", absent=("has_nonfinite_input", "has_nonfinite_loss"), unless=("is_local_view",), missing=_NO_LOCAL_VIEW),
    Row("nonfinite_backward", "nonfinite_values", 0.15, "inference", missing=_NO_REPLAY),
    # nonfinite_loss: what did the logger show?
    Row("hidden_nonfinite_loss", "nonfinite_loss", 0.93, "observation", seen=("is_logged_finite", "is_repeated")),
    Row("hidden_nonfinite_loss", "nonfinite_loss", 0.85, "observation", seen=("is_logged_finite",), absent=("is_repeated",)),
    Row("hidden_nonfinite_loss", "nonfinite_loss", 0.75, "documented", seen=("is_repeated",), unknown=("is_logged_finite",)),
    Row("hidden_nonfinite_loss", "nonfinite_loss", 0.50, "inference", missing=_NOT_LOGGED),
    # learning_rate: did it jump, and did the loss follow?
    Row("learning_rate_too_high", "learning_rate", 0.93, "observation", seen=("has_jump", "has_loss_reaction")),
    Row("learning_rate_too_high", "learning_rate", 0.85, "observation", seen=("has_jump",), absent=("has_loss_reaction",)),
    Row("learning_rate_too_high", "learning_rate", 0.65, "inference", missing="a change of the schedule to lay it to: steps are large and the loss rises, and which came first is not known"),
    # Norms and losses against their own history: symptoms, for want of a better-fitting cause.
    Row("exploding_gradients", "gradient_explosion", 0.85, "observation", seen=("has_loss_reaction",)),
    Row("exploding_gradients", "gradient_explosion", 0.75, "observation", absent=("has_loss_reaction",)),
    Row("exploding_gradients", "gradient_explosion", 0.60, "inference", missing=_NO_CAUSE),
    Row("vanishing_gradients", "gradient_vanishing", 0.85, "observation", seen=("is_from_start",)),
    Row("vanishing_gradients", "gradient_vanishing", 0.80, "observation", missing=_NO_CAUSE),
    Row("imbalanced_gradients", "gradient_balance", 0.85, "observation", seen=("is_above",)),
    Row("imbalanced_gradients", "gradient_balance", 0.75, "observation", missing=_NO_CAUSE),
    Row("loss_divergence", "loss_trend", 0.85, "observation", seen=("is_rising",)),
    Row("loss_divergence", "loss_trend", 0.10, "inference", missing=_NO_CAUSE),
    Row("loss_plateau", "loss_trend", 0.75, "observation", seen=("is_still",), absent=("is_rising",)),
    Row("overfitting", "overfitting", 0.90, "observation", seen=("is_training_falling", "is_evaluation_rising")),
    Row("overfitting", "overfitting", 0.40, "inference", missing="the training loss over the same steps"),
    Row("dominating_loss_term", "loss_terms", 0.90, "observation", seen=("is_zero",), absent=("is_zero_from_start",)),
    Row("dominating_loss_term", "loss_terms", 0.85, "observation", seen=("is_dominating",)),
    Row("dominating_loss_term", "loss_terms", 0.65, "inference", missing="the schedule of the terms' weights: a term may be meant to begin later"),
)  # fmt: skip
