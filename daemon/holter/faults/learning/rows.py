"""Why nothing, or the wrong thing, is learning."""

from holter.faults.row import Row

_NO_CENSUS = "a census that tells which parameters the optimizer holds and whether they have gradients"
_NO_PROOF = "what becomes of the modules' output: a result that the loss ignores on purpose and one that was detached by mistake look alike here"
_NO_LAYER = "the output of the activation itself: only what the next layer was given was seen"
_NO_LEFT_OVERS = "the gradients before the first backward pass of a step"
_NO_UPDATES = "the share of elements that a step changes, and the dtype of the weights"
_NO_SCALER = "the scaler's own count of skipped steps"
_NO_VARIATION = (
    "steps with another number of micro-batches, or the place at which the gradient is divided after backward"
)
_NO_DISTANCE = "the distance of the copy from the live weights over more steps"

ROWS: tuple[Row, ...] = (
    # optimizer_identity: are the optimizer's parameters the model's? have they gradients? are they frozen?
    Row("stale_optimizer_parameters", "optimizer_identity", 0.95, "observation", seen=("are_parameters_foreign",), absent=("has_foreign_gradient", "is_trainable_held")),
    Row("stale_optimizer_parameters", "optimizer_identity", 0.90, "observation", seen=("are_parameters_foreign",), absent=("has_foreign_gradient",)),
    Row("stale_optimizer_parameters", "optimizer_identity", 0.60, "inference", seen=("are_parameters_foreign",), missing=_NO_CENSUS),
    Row("nothing_trainable", "optimizer_identity", 0.95, "observation", seen=("are_all_held_frozen",), absent=("are_parameters_foreign",)),
    Row("nothing_trainable", "optimizer_identity", 0.15, "inference", missing=_NO_CENSUS),
    # missing_gradients: were gradients recorded? does the output lead back? does a layer give nothing but zeros?
    Row("graph_detached", "missing_gradients", 0.95, "observation", seen=("is_called", "is_gradient_off"), unless=("has_zero_layer",)),
    Row("graph_detached", "missing_gradients", 0.93, "observation", seen=("is_called",), absent=("has_gradient_path",), unless=("has_zero_layer",)),
    Row("graph_detached", "missing_gradients", 0.80, "documented", seen=("is_called", "is_most_of_the_model"), unless=("has_zero_layer",)),
    Row("graph_detached", "missing_gradients", 0.50, "inference", unless=("has_zero_layer",), missing=_NO_PROOF),
    Row("graph_detached", "missing_gradients", 0.15, "inference", missing=_NO_PROOF),
    Row("dead_activations", "missing_gradients", 0.93, "observation", seen=("has_zero_layer", "is_zero_layer_seen")),
    Row("dead_activations", "missing_gradients", 0.80, "documented", seen=("has_zero_layer",)),
    Row("dead_activations", "missing_gradients", 0.10, "inference", missing=_NO_LAYER),
    # uncleared_gradients: left over before backward? do they grow? does the applied norm grow with them?
    Row("gradients_never_cleared", "uncleared_gradients", 0.95, "observation", seen=("is_left_over", "does_grow")),
    Row("gradients_never_cleared", "uncleared_gradients", 0.60, "inference", missing=_NO_LEFT_OVERS),
    # still_weights: no bit, few elements, or no low bits?
    Row("rounded_away_updates", "still_weights", 0.93, "observation", seen=("does_little_change", "is_narrow", "is_rate_at_work")),
    Row("rounded_away_updates", "still_weights", 0.60, "inference", seen=("does_little_change",), missing=_NO_UPDATES),
    Row("lost_update", "still_weights", 0.90, "observation", seen=("is_unchanged", "is_update_large_enough")),
    Row("lost_update", "still_weights", 0.55, "inference", seen=("is_unchanged",), missing=_NO_UPDATES),
    Row("lost_update", "still_weights", 0.15, "inference", missing=_NO_UPDATES),
    # skipped_steps
    Row("every_step_skipped", "skipped_steps", 0.95, "observation", seen=("is_every_step_skipped",)),
    Row("every_step_skipped", "skipped_steps", 0.60, "inference", missing=_NO_SCALER),
    # accumulation_scale: did the number vary, and the norm with it? is the loss divided?
    Row("accumulation_not_normalised", "accumulation_scale", 0.90, "observation", seen=("does_norm_scale",), absent=("is_loss_divided",)),
    Row("accumulation_not_normalised", "accumulation_scale", 0.60, "inference", seen=("does_norm_scale",), missing="whether the loss was divided by the number of micro-batches in each of the steps compared; a short last group that is divided by the full number looks the same"),
    Row("accumulation_not_normalised", "accumulation_scale", 0.40, "inference", missing=_NO_VARIATION),
    # average_tracking
    Row("average_not_tracking", "average_tracking", 0.90, "observation", seen=("is_copy_still", "is_live_moving")),
    Row("average_not_tracking", "average_tracking", 0.75, "documented", seen=("is_copy_leaving",)),
    Row("average_not_tracking", "average_tracking", 0.55, "inference", missing=_NO_DISTANCE),
)  # fmt: skip
