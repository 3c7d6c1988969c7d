"""Nothing, or the wrong thing, is learning."""

from holter.faults.family import CauseEntry, Consequence, Damage, DetectorEntry, Family, Row, Stage
from holter.faults.learning.accumulation_scale import AccumulationScale
from holter.faults.learning.average_tracking import AverageTracking
from holter.faults.learning.evaluation_mode import EvaluationMode
from holter.faults.learning.missing_gradients import MissingGradients
from holter.faults.learning.optimizer_identity import OptimizerIdentity
from holter.faults.learning.skipped_steps import SkippedSteps
from holter.faults.learning.still_weights import StillWeights
from holter.faults.learning.uncleared_gradients import UnclearedGradients
from holter.faults.learning.zero_gradients import ZeroGradients
from holter.records import Fix

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

STALE_OPTIMIZER_PARAMETERS = CauseEntry(
    cause="stale_optimizer_parameters",
    happened="The optimizer holds tensors that are no longer the model's.",
    mechanism=(
        "The optimizer was built from the model's parameters, and then something replaced them: sharding (`fully_shard`, FSDP), a move or "
        "cast that makes new parameters, an adapter, weight tying. Backward fills the gradients of the new ones; the optimizer steps "
        "the old ones, which have none. Nothing raises."
    ),
    would_refute="The parameters that the optimizer holds have gradients.",
    refuting_fact="has_foreign_gradient",
    is_refuted_by=True,
    rows=(
        Row("optimizer_identity", 0.95, "observation", seen=("are_parameters_foreign",), absent=("has_foreign_gradient", "is_trainable_held")),
        Row("optimizer_identity", 0.90, "observation", seen=("are_parameters_foreign",), absent=("has_foreign_gradient",)),
        Row("optimizer_identity", 0.60, "inference", seen=("are_parameters_foreign",), missing=_NO_CENSUS),
    ),
    fix=Fix(
        do=(
            "Stop the run: the model has not been trained. Build the optimizer after everything that replaces parameters, from the "
            "sharded model: `fully_shard(model)` first, `AdamW(model.parameters())` second, the scheduler third. Start again from the beginning."
        ),
        changes="The order of a few lines. Hyper-parameters stay as they are; sharded optimizer state takes less memory than before.",
        does_not_fix="What was computed so far: the weights are those of the start, and checkpoints hold nothing new.",
        expect="Weights change at the first step, and the loss begins to fall.",
        verify="`{id(p) for p in model.parameters()} >= {id(p) for g in optimizer.param_groups for p in g['params']}`, after all wrapping.",
        otherwise=(
            "If a framework builds both (accelerate, a trainer), pass it model and optimizer together, in one `prepare` call, so that it can "
            "exchange the parameters; if it cannot, give it a function that builds the optimizer."
        ),
    ),
)  # fmt: skip

NOTHING_TRAINABLE = CauseEntry(
    cause="nothing_trainable",
    happened="Every parameter that the optimizers hold is frozen.",
    mechanism=(
        "`requires_grad` is false for all of them: the model was frozen after the optimizer was built, an adapter was loaded for "
        "inference, or the pattern that picks what to unfreeze matched nothing. Backward skips them and the step changes nothing."
    ),
    would_refute="The optimizer also holds parameters of its own that do have gradients.",
    refuting_fact="has_foreign_gradient",
    is_refuted_by=True,
    rows=(
        Row("optimizer_identity", 0.95, "observation", seen=("are_all_held_frozen",), absent=("are_parameters_foreign",)),
        Row("optimizer_identity", 0.15, "inference", missing=_NO_CENSUS),
    ),
    fix=Fix(
        do=(
            "Stop the run. Print the names of the parameters with `requires_grad` before building the optimizer. Load adapters with "
            "`is_trainable=True`, set `requires_grad_(True)` on what is to learn, and build the optimizer from exactly those."
        ),
        changes="Which parameters get gradients; memory grows by their gradients and optimizer state.",
        does_not_fix="The steps taken so far: no weight has changed, so there is nothing to resume.",
        expect="The number of trainable parameters is the one you meant, and the gradient norm is above zero at the first step.",
        verify="`sum(p.numel() for p in model.parameters() if p.requires_grad)` before the loop; stop if it is 0.",
        otherwise="If the patterns look right, look at what runs after them: an `eval()` helper, a `freeze()` in a callback, a checkpoint loaded with frozen flags.",
    ),
)  # fmt: skip

GRAPH_DETACHED = CauseEntry(
    cause="graph_detached",
    happened="A part of the model that is to be trained is called but gets no gradient.",
    mechanism=(
        "The path from the loss back to these parameters is cut: the modules ran under `no_grad` or `inference_mode`, their result was "
        "detached or passed through numpy, or reentrant checkpointing was given an input that requires no gradient (the output of "
        "a frozen embedding) and so recorded nothing. Or an operation on the way has no slope where it is used: rounding, a clamp, a function "
        "that is saturated, a backward of one's own that gives zeros. The optimizer passes over gradients that are None."
    ),
    would_refute="The named modules' output leads back to their parameters, and the loss merely does not use it.",
    refuting_fact="has_gradient_path",
    is_refuted_by=True,
    rows=(
        Row("missing_gradients", 0.95, "observation", seen=("is_called", "is_gradient_off"), unless=("has_zero_layer",)),
        Row("missing_gradients", 0.93, "observation", seen=("is_called",), absent=("has_gradient_path",), unless=("has_zero_layer",)),
        Row("missing_gradients", 0.93, "observation", seen=("is_called", "is_lost_on_the_way"), unless=("has_zero_layer",)),
        Row("missing_gradients", 0.80, "documented", seen=("is_called", "is_most_of_the_model"), unless=("has_zero_layer",)),
        Row("missing_gradients", 0.80, "documented", absent=("is_called",), unless=("has_zero_layer",)),
        Row("missing_gradients", 0.85, "documented", seen=("is_called", "is_stopped"), unless=("has_zero_layer",)),
        Row("missing_gradients", 0.50, "inference", unless=("has_zero_layer",), missing=_NO_PROOF),
        Row("missing_gradients", 0.15, "inference", missing=_NO_PROOF),
    ),
    fix=Fix(
        do=(
            "Look at the call of the first module named. With `torch.utils.checkpoint`, pass `use_reentrant=False`, or call "
            "`model.enable_input_require_grads()` so that a frozen embedding's output requires a gradient. Else remove the `no_grad`, "
            "`detach`, `.data` or `.item()` between it and the loss."
        ),
        changes="These parameters begin to learn; memory and time grow by their backward pass.",
        does_not_fix="The steps so far: these modules are as they were at the start, and what came after them has adapted to that. Start again if you can.",
        expect="Every trainable parameter has a gradient after the first backward pass.",
        verify="After one backward: `[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]` is empty.",
        otherwise=(
            "If the part is meant to be unused or frozen, say so: leave it out of the optimizer or set `requires_grad_(False)`, so that it costs "
            "no memory and raises no question."
        ),
    ),
)  # fmt: skip

DEAD_ACTIVATIONS = CauseEntry(
    cause="dead_activations",
    happened="A layer gives zero for all inputs, so that nothing before it learns.",
    mechanism=(
        "All inputs of a ReLU are negative (a bias driven down by one large step, a bad initialisation, inputs that are not centred), or a "
        "gate or mask is shut. Its derivative is zero there as well, so no gradient passes back and nothing can open it again."
    ),
    would_refute="No layer was seen to give nothing but zeros.",
    refuting_fact="has_zero_layer",
    is_refuted_by=False,
    damage=Damage("before the step", "suspect", "a layer gives zero for every input, and nothing brings it back"),
    rows=(
        Row("missing_gradients", 0.93, "observation", seen=("has_zero_layer", "is_zero_layer_seen")),
        Row("missing_gradients", 0.80, "documented", seen=("has_zero_layer",)),
        Row("missing_gradients", 0.10, "inference", missing=_NO_LAYER),
    ),
    fix=Fix(
        do=(
            "Look at the layer named and at what feeds it: print its inputs' range for one batch. Initialise the layer before it anew (bias "
            "zero, He), lower the learning rate or add a warm-up, and use an activation that leaks (GELU, LeakyReLU). Resume from before it died."
        ),
        changes="One layer's weights, or its activation; results before and after are comparable only after some training.",
        does_not_fix="What made the weights jump: if a spike of the gradient norm came before, look at that first.",
        expect="A share of the layer's outputs is above zero for every batch, and the gradients before it are not zero.",
        verify="A forward hook on the named layer: `(output == 0).float().mean()` is below one.",
        otherwise="If the layer is shut on purpose (a gate that begins at zero, a masked branch), give its inputs no trainable parameters or open it by a schedule.",
    ),
)  # fmt: skip

GRADIENTS_NEVER_CLEARED = CauseEntry(
    cause="gradients_never_cleared",
    happened="Gradients are not cleared between steps, so that each step applies the sum of all so far.",
    mechanism=(
        "`backward` adds to what `.grad` holds. Without `zero_grad` the gradient of step n is the sum of n gradients: the effective learning rate "
        "grows with the step, old directions are applied again and again, and the loss swings and then diverges."
    ),
    would_refute="Gradients were there before the backward pass but did not grow: they belong to another optimizer's own last step.",
    refuting_fact="does_grow",
    is_refuted_by=False,
    damage=Damage("with the step", "suspect", "gradients of earlier steps were applied again"),
    rows=(
        Row("uncleared_gradients", 0.95, "observation", seen=("is_left_over", "does_grow")),
        Row("uncleared_gradients", 0.85, "documented", seen=("is_left_over", "does_last")),
        Row("uncleared_gradients", 0.60, "inference", missing=_NO_LEFT_OVERS),
    ),
    fix=Fix(
        do=(
            "Stop the run. Call `optimizer.zero_grad()` once for each optimizer step, before its first backward pass (with accumulation: after "
            "the step, not after each micro-batch). Start again from the beginning, or from a checkpoint before the step named."
        ),
        changes="The gradient of every step. The learning rate that seemed right before was too small: expect to tune it again.",
        does_not_fix="Weights trained this way, and the optimizer's moments, which hold the sums.",
        expect="The gradient norm stops growing with the step number; the loss falls without swinging.",
        verify="Before the first backward of a step, `all(p.grad is None or not p.grad.any() for p in model.parameters())`.",
        otherwise=(
            "If `zero_grad` is called, it is called on something else: `model.zero_grad()` before wrapping, another optimizer, a branch that is "
            "skipped. Parameters outside the optimizer need `model.zero_grad()`."
        ),
    ),
)  # fmt: skip

LOST_UPDATE = CauseEntry(
    cause="lost_update",
    happened="The tensor has a gradient, steps are taken, and the tensor does not change.",
    mechanism=(
        "What the step wrote was undone or went elsewhere: weights that are copied back after the step (an average, a swap, a broadcast, a stale "
        "shard), an optimizer that steps a copy, a hook or a clamp that restores the old value. Or the step wrote nothing: the learning rate of "
        "the tensor's group, or of all groups, is zero (a schedule that never leaves zero or has run out, a factor of an integer division). Or no "
        "optimizer that is stepped holds the tensor: a filter left it out, a second optimizer is never called."
    ),
    would_refute="The update that these tensors should get is smaller than their own rounding.",
    refuting_fact="is_update_large_enough",
    is_refuted_by=False,
    rows=(
        Row("still_weights", 0.90, "observation", seen=("is_unchanged", "is_update_large_enough")),
        Row("still_weights", 0.90, "observation", seen=("is_rate_zero",)),
        Row("still_weights", 0.92, "observation", seen=("is_unheld_at_rest",)),
        Row("still_weights", 0.75, "documented", seen=("is_unheld",)),
        Row("still_weights", 0.55, "inference", seen=("is_unchanged",), missing=_NO_UPDATES),
        Row("still_weights", 0.15, "inference", missing=_NO_UPDATES),
    ),
    fix=Fix(
        do=(
            "Compare one named tensor right before `optimizer.step()`, right after it, and at the start of the next step: the place where the change "
            "vanishes is the culprit. Look for `load_state_dict`, `copy_`, `swap`, `.data =` and step hooks between them."
        ),
        changes="The code that writes to the weights after the step; training itself stays as it is.",
        does_not_fix="The steps so far: these tensors are as they were before them.",
        expect="The named tensors change at every step by about the learning rate times their normalised gradient.",
        verify="`before = p.clone(); optimizer.step(); assert not torch.equal(before, p)` for the named tensors.",
        otherwise="If they do not change within `optimizer.step()` itself, look at its groups and their schedule: a learning rate of zero, a fused or capturable variant that skips them. What is to rest on purpose is better frozen: `requires_grad_(False)`.",
    ),
)  # fmt: skip

ROUNDED_AWAY_UPDATES = CauseEntry(
    cause="rounded_away_updates",
    happened="The updates are below half a unit in the last place of the weights' own dtype, so that few elements change.",
    mechanism=(
        "A bf16 weight has 8 significant bits: next to 0.1 the neighbouring numbers are 0.0005 away. An update of 1e-5 is rounded to nothing, at "
        "every step again, and never adds up. Only weights near zero still move."
    ),
    would_refute="The weights are in fp32, whose rounding is far below the update.",
    refuting_fact="is_narrow",
    is_refuted_by=False,
    rows=(
        Row("still_weights", 0.93, "observation", seen=("does_little_change", "is_narrow", "is_rate_at_work")),
        Row("still_weights", 0.85, "observation", seen=("does_little_change", "is_rate_too_small")),
        Row("still_weights", 0.60, "inference", seen=("does_little_change",), missing=_NO_UPDATES),
    ),
    fix=Fix(
        do=(
            "Keep the weights that the optimizer steps in fp32 and compute in bf16 under autocast (or FSDP's MixedPrecisionPolicy with fp32 "
            "shards). If memory forbids that, use an optimizer with stochastic rounding or Kahan summation for bf16."
        ),
        changes="Memory: 2 more bytes a weight, and fp32 moments. Speed hardly changes, since the computation stays in bf16.",
        does_not_fix="The steps so far: most of what they should have taught is lost. Convert the checkpoint to fp32 and go on from it.",
        expect="Nearly all elements with a gradient change at every step, and the loss falls faster at the same learning rate.",
        verify="`(p != before).float().mean()` after one step is above 0.9 for the modules named.",
        otherwise="A larger learning rate also gets over the rounding, and is rarely what the model needs. Larger batches do not help: they leave the update's size as it is.",
    ),
)  # fmt: skip

EVERY_STEP_SKIPPED = CauseEntry(
    cause="every_step_skipped",
    happened="The loss scaler skips every step and its scale collapses.",
    mechanism=(
        "The scaler skips a step whose gradients hold NaN or Inf, and halves its scale in the hope that it was an overflow. What is not finite at "
        "any scale (an Inf in the batch, a log of zero, an overflow in the forward pass) is there again next time: every step is "
        "skipped, the scale goes to zero, and the weights stay as they are."
    ),
    would_refute="The scaler let steps pass in between.",
    refuting_fact="is_every_step_skipped",
    is_refuted_by=False,
    rows=(
        Row("skipped_steps", 0.95, "observation", seen=("is_every_step_skipped",), unless=("is_overflow",)),
        Row("skipped_steps", 0.85, "observation", seen=("is_every_step_skipped", "is_overflow")),
        Row("skipped_steps", 0.60, "inference", missing=_NO_SCALER),
    ),
    fix=Fix(
        do=(
            "Stop the run. Switch the scaler off for one batch and look for the first NaN or Inf: batch, loss, then gradients in backward order (the "
            "evidence names what was seen). Mend that: clean the data, guard the operation, keep the overflowing module in fp32 or bf16."
        ),
        changes="The operation or the data that makes the NaN. The scaler's settings stay at their defaults.",
        does_not_fix="The steps so far: none was applied. The scaler's own state must be reset: begin with a fresh one, not with the collapsed scale.",
        expect="The scale settles between 1 and 65536, with a skipped step now and then.",
        verify="`scaler.get_scale()` no longer falls over 100 steps; the weights change at every step.",
        otherwise="If everything is finite without the scaler, its first scale is too high for this model: set `init_scale` to 1024. bf16 needs no scaler at all.",
    ),
)  # fmt: skip

ACCUMULATION_NOT_NORMALISED = CauseEntry(
    cause="accumulation_not_normalised",
    happened="The losses of the micro-batches are summed, or averaged with the wrong weights.",
    mechanism=(
        "`backward` adds gradients. If each micro-batch's loss is a mean and none is divided by their number, k micro-batches give k times "
        "the gradient of a mean: under SGD k times the learning rate, under clipping a clip at every step. A step with fewer micro-batches then "
        "counts for less."
    ),
    would_refute="The loss is divided by the number of micro-batches before backward.",
    refuting_fact="is_loss_divided",
    is_refuted_by=True,
    rows=(
        Row("accumulation_scale", 0.90, "observation", seen=("does_norm_scale",), absent=("is_loss_divided",)),
        Row("accumulation_scale", 0.60, "inference", seen=("does_norm_scale",), missing="whether the loss was divided by the number of micro-batches in each of the steps compared; a short last group that is divided by the full number looks the same"),
        Row("accumulation_scale", 0.40, "inference", missing=_NO_VARIATION),
    ),
    fix=Fix(
        do=(
            "Divide the loss by the number of micro-batches of this very step before `backward`; if they differ in samples or tokens, sum the losses "
            "and divide by the step's total of samples or tokens instead."
        ),
        changes="The size of every gradient, by the number of micro-batches: multiply the learning rate by it under SGD; under Adam it only matters for clipping and epsilon.",
        does_not_fix="A learning rate that was tuned with the sum: it looks too low afterwards, and is right for the sum only.",
        expect="Apart from noise, the gradient norm no longer depends on the number of micro-batches.",
        verify="The same samples as one batch and as k micro-batches give the same gradient to rounding.",
        otherwise="If the gradient is divided elsewhere (a hook, the optimizer, the framework), nothing is wrong. Check the short last group of an epoch all the same.",
    ),
)  # fmt: skip

AVERAGE_NOT_TRACKING = CauseEntry(
    cause="average_not_tracking",
    happened="An averaged copy of the weights never moves, or moves away from them.",
    mechanism=(
        "The update is not called, is called on a copy taken before wrapping or sharding, runs with a decay of one (or one that a warm-up "
        "never lowers), or averages in a dtype whose rounding swallows the small difference that it adds."
    ),
    would_refute="The live weights did not move either.",
    refuting_fact="is_live_moving",
    is_refuted_by=False,
    damage=Damage("before the step", "suspect", "the averaged copy is no average of these weights"),
    rows=(
        Row("average_tracking", 0.90, "observation", seen=("is_copy_still", "is_live_moving")),
        Row("average_tracking", 0.75, "documented", seen=("is_copy_leaving",)),
        Row("average_tracking", 0.55, "inference", missing=_NO_DISTANCE),
    ),
    fix=Fix(
        do=(
            "Call the update right after each `optimizer.step()`, with the live module's parameters; keep the copy in fp32; check the decay that is in "
            "effect at this step. Begin the average anew from the live weights."
        ),
        changes="The averaged copy only; the training does not see it.",
        does_not_fix="Evaluations and checkpoints made from the copy so far: they show old weights.",
        expect="The distance from the live weights settles at a few percent and follows them.",
        verify="Log the distance: it falls to zero when the learning rate does.",
        otherwise="If the average begins late on purpose, log it from then on. If its distance grows without bound, its update has the wrong sign or weights that do not sum to one.",
    ),
)  # fmt: skip

ZERO_GRADIENTS = CauseEntry(
    cause="zero_gradients",
    happened="Every gradient is exactly zero although the graph is connected: the loss is flat where the model is.",
    mechanism=(
        "Between the model and the loss stands something whose derivative is zero here: a clamp or a floor (`clamp(min=...)`, `relu(loss - margin)`), "
        "a saturated function, a product with zero, a mask that leaves nothing. Backward runs through it and multiplies everything by zero."
    ),
    would_refute="Some gradient of some rank is not zero.",
    refuting_fact="is_any_nonzero",
    is_refuted_by=True,
    rows=(
        Row("zero_gradients", 0.93, "observation", seen=("is_loss_constant",), absent=("is_any_nonzero",)),
        Row("zero_gradients", 0.92, "observation", seen=("is_from_start",), absent=("is_any_nonzero",)),
        Row("zero_gradients", 0.85, "documented", absent=("is_any_nonzero",)),
        Row("zero_gradients", 0.10, "inference", missing="whether some gradient is not zero"),
    ),
    fix=Fix(
        do=(
            "Print the loss before and after each of the last operations, for one batch, and take out the one that makes it flat: a clamp or floor "
            "above its values, a weight of zero, an empty mask. Start again from the step named: nothing was learned since."
        ),
        changes="The loss, and with it every gradient.",
        does_not_fix="The steps since then: they changed the weights by decay and momentum at most.",
        expect="The gradient norm is above zero at the first step.",
        verify="After one backward pass: `any(p.grad is not None and p.grad.any() for p in model.parameters())`.",
        otherwise=(
            "If no operation of the loss is flat, look for gradients that are zeroed after backward (a hook, a mask, `zero_grad` in the wrong "
            "place), or for outputs that saturate: logits of hundreds before a sigmoid."
        ),
    ),
)  # fmt: skip

TRAINED_IN_EVALUATION_MODE = CauseEntry(
    cause="trained_in_evaluation_mode",
    happened="Modules that behave otherwise in training are trained in evaluation mode, everywhere or on some ranks.",
    mechanism=(
        "`eval()` was called, for an evaluation or by a loader of weights, and `train()` was not called after it, or not on every rank. Dropout then "
        "drops nothing, and normalisation uses statistics that no longer follow the data. Nothing raises, gradients flow, the loss may even look better."
    ),
    would_refute="The calls in evaluation mode are not those that the optimizer steps on.",
    refuting_fact="is_stepped",
    is_refuted_by=False,
    rows=(
        Row("evaluation_mode", 0.93, "observation", seen=("do_ranks_differ", "is_stepped")),
        Row("evaluation_mode", 0.93, "observation", seen=("is_whole_model", "is_stepped")),
        Row("evaluation_mode", 0.10, "inference", missing="whether what is in evaluation mode is stepped"),
    ),
    fix=Fix(
        do=(
            "Call `model.train()` before the first step and after every evaluation, generation or export, on all ranks and outside of any condition on "
            "the rank. Go on from a checkpoint older than the step named if overfitting or the statistics matter."
        ),
        changes="The named modules drop and normalise again: the training loss rises a little, the evaluation's should fall.",
        does_not_fix="What was learned without them since then, and running statistics that stood still: let them settle for some hundred steps.",
        expect="`model.training` is true at each call that is trained, on all ranks.",
        verify="`assert model.training` before the call in the loop; `holter report` stays empty.",
        otherwise=(
            "If it is meant (statistics frozen for fine-tuning), put only those modules into evaluation mode and leave the model in training; for "
            "dropout set its probability to zero, which says so."
        ),
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(OptimizerIdentity(), Stage.OPTIMIZER_BUILT, incident_per="run"),
        DetectorEntry(UnclearedGradients(), Stage.CLEARED),
        DetectorEntry(SkippedSteps(), Stage.CLEARED),
        DetectorEntry(EvaluationMode(), Stage.FORWARD),
        DetectorEntry(ZeroGradients(), Stage.BACKWARD, "weights"),
        DetectorEntry(MissingGradients(), Stage.BACKWARD, "weights", incident_per="run"),
        DetectorEntry(AccumulationScale(), Stage.GIVEN),
        DetectorEntry(StillWeights(), Stage.WEIGHTS_AFTER, "weights"),
        DetectorEntry(AverageTracking(), Stage.WEIGHTS_AFTER, "weights", tried_on="made-up windows"),
    ),
    causes=(
        STALE_OPTIMIZER_PARAMETERS, NOTHING_TRAINABLE, GRAPH_DETACHED, DEAD_ACTIVATIONS, GRADIENTS_NEVER_CLEARED, LOST_UPDATE,
        ROUNDED_AWAY_UPDATES, EVERY_STEP_SKIPPED, ACCUMULATION_NOT_NORMALISED, AVERAGE_NOT_TRACKING,
        ZERO_GRADIENTS, TRAINED_IN_EVALUATION_MODE,
    ),
    brings_about=(
        Consequence("optimizer_identity", ("uncleared_gradients", "replica_divergence"), ("weights", "curves"), whenever=True),
        Consequence("uncleared_gradients", ("accumulation_scale", "learning_rate"), ("curves",), whenever=True),
        Consequence("uncleared_gradients", ("nonfinite_values",), unless_follower_is=("nonfinite_input",)),
        Consequence("accumulation_scale", groups=("curves",)),
        # Steps that do not happen, or change nothing.
        Consequence("skipped_steps", ("nonfinite_values",), ("weights", "curves"), whenever=True),
        Consequence("missing_gradients", ("still_weights", "gradient_vanishing", "gradient_balance", "loss_trend"), whenever=True),
        Consequence("zero_gradients", ("missing_gradients", "still_weights"), ("curves",), whenever=True),
        Consequence("evaluation_mode", ("buffer_divergence",), ("curves",), whenever=True),
        Consequence("still_weights", ("loss_trend",)),
    ),
)  # fmt: skip
