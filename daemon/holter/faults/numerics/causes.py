"""Numbers that are not numbers, and losses that go wrong."""

from holter.faults.family import NOT_BY_A_NUMBER, CauseEntry, Consequence, Damage, DetectorEntry, Family, Row, Stage
from holter.faults.numerics.gradient_balance import GradientBalance
from holter.faults.numerics.gradient_explosion import GradientExplosion
from holter.faults.numerics.gradient_vanishing import GradientVanishing
from holter.faults.numerics.learning_rate import LearningRate
from holter.faults.numerics.loss_terms import LossTerms
from holter.faults.numerics.loss_trend import LossTrend
from holter.faults.numerics.nonfinite_loss import NonfiniteLoss
from holter.faults.numerics.nonfinite_values import NonfiniteValues
from holter.faults.numerics.overfitting import Overfitting
from holter.records import Fix

_STEPS_OF_A_RISE = 30
"""Number of steps that a rise must last to be one."""
_NO_LOCAL_VIEW = (
    "gradients from before the reduction: the framework did not show them, so the rank that made the NaN is not known"
)
_NO_REPLAY = "a replay of the step's batch, to name the module"
_NOT_LOGGED = "what the script's logger showed at these steps, and the gradients: whether anybody could have seen it"
_NO_CAUSE = "what set it off: data, schedule and resumed state of the steps before were not seen to change"

NONFINITE_INPUT = CauseEntry(
    cause="nonfinite_input",
    happened="A batch held NaN or Inf, and the optimizer was given the gradients made from it.",
    mechanism=(
        "NaN in a batch passes through the forward pass into that rank's loss and gradients. The reduction then adds that rank's "
        "gradients to everyone's, and the optimizer, unless it is held, writes NaN into the weights of every rank in the same step."
    ),
    would_refute="The named rank's own gradients were finite in spite of its batch.",
    refuting_fact="has_nonfinite_gradient",
    is_refuted_by=False,
    damage=Damage("with the step", "poisoned", "NaN or Inf of a batch was applied to the weights"),
    rows=(
        Row("nonfinite_values", 0.93, "observation", seen=("has_nonfinite_input", "has_nonfinite_loss")),
        Row("nonfinite_values", 0.85, "observation", seen=("has_nonfinite_input",), absent=("has_nonfinite_loss",)),
        Row("nonfinite_values", 0.60, "inference", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input", "is_origin_input_finite"), missing="the batch as the model got it: it was finite as it came, but a replay met a module whose input was not"),
    ),
    fix=Fix(
        do=(
            "Stop the run. Load this step's batch again on the named rank (same seed, epoch and index), find the bad sample in the "
            "tensors named here, repair or drop it, and make the data loader reject batches that are not finite. Resume from a "
            "checkpoint that is older than this step."
        ),
        changes="One sample, or the code that makes it. Model, optimizer and schedule stay as they are.",
        does_not_fix=(
            "The weights, if the step was applied: then they are NaN on every rank. (A halt holds the step before that.) Clipping, a lower learning rate or skipping the next "
            "batches bring nothing back, and checkpoints written after this step are lost."
        ),
        expect="The resumed run passes this step with a finite loss and continues the old curve.",
        verify="`torch.isfinite(x).all()` holds for the batch of this step on this rank, and no new incident is opened at this step.",
        otherwise=(
            "If the sample on disk is finite, it was spoiled on the way: a normalisation by a deviation of zero, a log of zero, a cast "
            "to half precision, an uninitialised buffer in a loader's worker. Run transforms and collate on it alone."
        ),
    ),
)  # fmt: skip

NONFINITE_FORWARD = CauseEntry(
    cause="nonfinite_forward",
    happened="The forward pass made NaN or Inf out of a finite batch, and the optimizer was given the gradients made from it.",
    mechanism=(
        "A module overflowed its dtype, divided by zero, took the log or root of a value outside its domain, or normalised something "
        "without spread. The loss became NaN on that rank; the reduction carried it to all."
    ),
    would_refute="The batch itself held NaN or Inf.",
    refuting_fact="has_nonfinite_input",
    is_refuted_by=True,
    damage=Damage("with the step", "poisoned", "NaN or Inf of the forward pass was applied to the weights"),
    rows=(
        Row("nonfinite_values", 0.95, "observation", seen=("has_nonfinite_loss", "has_origin_module", "is_origin_input_finite"), absent=("has_nonfinite_input",), unless=("is_overflow",)),
        Row("nonfinite_values", 0.85, "documented", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input",), unless=("has_origin_module", "is_outside_modules")),
        Row("nonfinite_values", 0.50, "inference", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input",), unless=("is_outside_modules",), missing=_NO_REPLAY + " that starts from finite inputs"),
    ),
    fix=Fix(
        do=(
            "Look at the named module, or where none is named at the model's forward pass, with this step's batch: largest input against its dtype's limit (65504 for fp16), "
            "divisions, logs, roots, softmax over a row that is masked entirely. Guard that operation (an epsilon, fp32 for this "
            "module, a clamp on its input) and resume from a checkpoint that is older than this step."
        ),
        changes="The arithmetic of one module. A clamp or an epsilon changes results slightly; fp32 costs memory there.",
        does_not_fix="The weights, if the step was applied: then they are NaN on every rank. Nor the growth that led here, if the values had been rising for many steps.",
        expect="The replayed step has a finite loss, and the module's largest output stays well under its dtype's limit.",
        verify="Replay the batch of this step from the older checkpoint: every module's output is finite.",
        otherwise=(
            "If all ranks had it at the same step, the weights were already bad: look at the gradient norm and learning rate of the "
            "steps before."
        ),
    ),
)  # fmt: skip

NONFINITE_LOSS_FUNCTION = CauseEntry(
    cause="nonfinite_loss_function",
    happened="The code that makes the loss made NaN or Inf out of a finite batch and finite outputs of the model.",
    mechanism=(
        "The loss function, or the script's own code around it, took the log or root of a value outside its domain, divided by zero, took the mean of nothing (a mask "
        "that leaves no element, labels that are all ignored), or was given a target or a weight that is not finite. Every module of the model gave finite numbers."
    ),
    would_refute="The batch itself held NaN or Inf.",
    refuting_fact="has_nonfinite_input",
    is_refuted_by=True,
    damage=Damage("with the step", "suspect", "the loss function made NaN or Inf"),
    rows=(
        Row("nonfinite_values", 0.94, "observation", seen=("has_nonfinite_loss", "is_outside_modules"), absent=("has_nonfinite_input",)),
        Row("nonfinite_loss", 0.92, "observation", seen=("is_outside_modules",)),
    ),
    fix=Fix(
        do=(
            "Look at the line that the evidence names first, with this step's batch. Guard the operation there: an epsilon inside log, root and division "
            "(`log_softmax` instead of `log(softmax)`), `clamp(min=1)` under a sum over a mask, a step that is skipped where no label counts."
        ),
        changes="The loss of the batches that meet the guard; others stay as they are.",
        does_not_fix="The weights, if the step was applied: then they are NaN on every rank. Nor a batch that should not have been there: an empty one, one without labels.",
        expect="This step's batch has a finite loss.",
        verify="Compute the loss of this step's batch from the checkpoint before it: it is finite.",
        otherwise="If the loss is finite then, the replay was not the same: look for a target, a weight or a counter that the script keeps between steps.",
    ),
)  # fmt: skip

NONFINITE_BACKWARD = CauseEntry(
    cause="nonfinite_backward",
    happened="Batch and loss were finite, a gradient was not, and the optimizer was given it.",
    mechanism=(
        "The derivative of an operation is infinite or undefined where its value is not: a root or a norm at zero, `where` around a "
        "branch that holds NaN, a division by a tiny number, an overflow of fp16 gradients without a loss scaler."
    ),
    would_refute="The loss itself was NaN or Inf.",
    refuting_fact="has_nonfinite_loss",
    is_refuted_by=True,
    damage=Damage("with the step", "poisoned", "NaN or Inf in gradients was applied to the weights"),
    rows=(
        Row("nonfinite_values", 0.93, "observation", seen=("has_nonfinite_gradient", "is_local_view"), absent=("has_nonfinite_input", "has_nonfinite_loss"), unless=("is_overflow",)),
        Row("nonfinite_values", 0.40, "inference", seen=("is_overflow",), absent=("has_nonfinite_input", "has_nonfinite_loss"), missing="the backward pass of that module alone: the overflow before it explains the gradients already"),
        Row("nonfinite_values", 0.60, "inference", absent=("has_nonfinite_input", "has_nonfinite_loss"), unless=("is_local_view",), missing=_NO_LOCAL_VIEW),
        Row("nonfinite_values", 0.15, "inference", missing=_NO_REPLAY),
    ),
    fix=Fix(
        do=(
            "Stop the run. Start from the first tensor named here: backward runs from the loss to the input, so what broke lies in its "
            "module or just behind it. Look there for sqrt, norm, log, division, `where`, a custom backward; put the guard inside the "
            "operation (`sqrt(x + eps)`), not around its result. Resume from a checkpoint that is older than this step."
        ),
        changes="The derivative of one operation near its singular point; forward results change by at most the epsilon.",
        does_not_fix="The weights, if the step was applied: then they are NaN on every rank. `nan_to_num` on gradients would hide the next one, not prevent it.",
        expect="All gradients of this step are finite when its batch is replayed.",
        verify="Run this step's batch under `torch.autograd.set_detect_anomaly(True)`: it raises no error.",
        otherwise=(
            "With fp16 and no loss scaler, use one or bf16. If only the reduced gradient is not finite while every rank's own is, the "
            "sum overflowed in the reduction: reduce in fp32, or divide before reducing."
        ),
    ),
)  # fmt: skip

ACTIVATION_OVERFLOW = CauseEntry(
    cause="activation_overflow",
    happened="A module's output passed the largest number of its dtype, and the gradients made from it are not finite.",
    mechanism=(
        "Values grew from layer to layer, or from step to step, until a product or a sum no longer fitted the output's dtype: 65504 for "
        "fp16, 3.4e38 for bf16 and fp32. It became Inf, the next subtraction or normalisation made NaN of it, and the loss with it. Ranks "
        "with equal weights overflow together, so all of them may be named."
    ),
    would_refute="The magnitudes around the named module were far from its dtype's limit: then the operation is undefined there, not too large.",
    refuting_fact="is_overflow",
    is_refuted_by=False,
    damage=Damage("with the step", "poisoned", "an overflow was applied to the weights"),
    rows=(
        Row("nonfinite_values", 0.93, "observation", seen=("is_overflow", "has_nonfinite_loss", "has_origin_module", "is_origin_input_finite"), absent=("has_nonfinite_input",)),
        Row("nonfinite_values", 0.90, "observation", seen=("is_overflow", "has_origin_module", "is_origin_input_finite"), absent=("has_nonfinite_input", "has_nonfinite_loss")),
        Row("skipped_steps", 0.93, "observation", seen=("is_overflow",)),
    ),
    fix=Fix(
        do=(
            "Stop the run. Run the named module in bf16 or fp32 (`with torch.autocast(device, enabled=False)` around it, inputs cast "
            "with `.float()`), or keep its input small: normalise before it, scale its weights down. Resume from a checkpoint that is "
            "older than this step."
        ),
        changes="The dtype of one module: more memory there. bf16 has the range of fp32 and fewer digits than fp16.",
        does_not_fix=(
            "The weights, if the step was applied: then they are NaN on every rank. A loss scaler does not help: it protects gradients from underflow and skips "
            "steps that overflowed, but every forward pass will overflow again. Clipping gradients comes too late for this step."
        ),
        expect="The module's largest output on this batch is finite and stays under a quarter of its dtype's limit.",
        verify="Replay the batch of this step from the older checkpoint in the new dtype: every module's output is finite.",
        otherwise=(
            "If fp32 overflows as well, the values are wrong, not the dtype: look at the gradient norm, the learning rate and the norm "
            "of this module's weights over the steps before, and at the scale of the batch."
        ),
    ),
)  # fmt: skip

HIDDEN_NONFINITE_LOSS = CauseEntry(
    cause="hidden_nonfinite_loss",
    happened="The raw loss is NaN or Inf, and what the logger shows does not say so.",
    mechanism=(
        "Loggers average, smooth or filter: the Trainer's `logging_nan_inf_filter` (on by default) puts the last good average in the place "
        "of a NaN, `nanmean` and running means do the same. The curve stays where it was, while steps are computed from nothing, or only from "
        "those micro-batches that happened to be finite."
    ),
    would_refute="The logger showed NaN as well: then nothing was hidden.",
    refuting_fact="is_logged_finite",
    is_refuted_by=False,
    damage=Damage("with the step", "suspect", "the loss was NaN or Inf"),
    rows=(
        Row("nonfinite_loss", 0.93, "observation", seen=("is_logged_finite", "is_repeated")),
        Row("nonfinite_loss", 0.85, "observation", seen=("is_logged_finite",), absent=("is_repeated",)),
        Row("nonfinite_loss", 0.75, "documented", seen=("is_repeated",), unknown=("is_logged_finite",)),
        Row("nonfinite_loss", 0.50, "inference", missing=_NOT_LOGGED),
    ),
    fix=Fix(
        do=(
            "Believe the raw loss. Set `logging_nan_inf_filter=False`, or log the unsmoothed loss. Look at the batch of the first step named "
            "here: labels that are all ignored (-100) give 0/0, a log of zero gives Inf. If every step since is NaN, stop and resume from a "
            "checkpoint that is older than that step."
        ),
        changes="What is shown; and the loss of the batches that have nothing to average over.",
        does_not_fix="Weights that are NaN already. Showing the NaN does not remove it.",
        expect="The logged loss and the raw one agree, and both are finite.",
        verify="`torch.isfinite(loss)` holds at every step after the first one named here.",
        otherwise=(
            "If the raw loss is NaN only now and then, count labels that are not ignored in those batches, and divide by "
            "`max(count, 1)`. If it never ends, look for NaN in the parameters: `all(p.isfinite().all() for p in model.parameters())`."
        ),
    ),
)  # fmt: skip

LEARNING_RATE_TOO_HIGH = CauseEntry(
    cause="learning_rate_too_high",
    happened="The learning rate became too high for this model, and gradients and loss left their history.",
    mechanism=(
        "A step is the gradient times the learning rate. Beyond a certain size it overshoots the valley that it descends: the next "
        "gradient is larger and points back, the step after that is larger still. A schedule that is stepped twice, restarted with "
        "another peak, counted in other units (epochs for steps) or lost on resuming jumps over that size within one step."
    ),
    would_refute="Loss or gradient norm were out of their history before the learning rate changed.",
    refuting_fact="was_ordinary_at_jump",
    is_refuted_by=False,
    damage=Damage("with the step", "suspect", "steps became too large, and the weights took them"),
    rows=(
        Row("learning_rate", 0.93, "observation", seen=("has_jump", "has_loss_reaction")),
        Row("learning_rate", 0.85, "observation", seen=("has_jump",), absent=("has_loss_reaction",)),
        Row("learning_rate", 0.65, "inference", missing="a change of the schedule that explains it: steps are large and the loss rises, and which came first is not known"),
    ),
    fix=Fix(
        do=(
            "Stop the run. Print the schedule around the step named here (`scheduler.get_last_lr()`), and correct what makes it jump: "
            "warm-up and total in optimizer steps, one `scheduler.step()` a step, its state saved and loaded with the optimizer's. Resume "
            "from a checkpoint that is older than that step."
        ),
        changes="The learning rate from that step on. Nothing else.",
        does_not_fix=(
            "The weights since that step: lowering the rate now starts from a worse place, and the optimizer's moments remember the large "
            "gradients. Clipping bounds the harm and hides the cause."
        ),
        expect="Norm and loss pass that step as they did the steps before.",
        verify="The resumed run shows the intended learning rate at that step, and the gradient norm stays within its history for 20 steps after.",
        otherwise=(
            "If the rate is what you want, warm up to it over a few hundred steps, or clip the norm at about its median. If the rate never "
            "changed, halve it until the loss no longer rises; steps should change a module by about a thousandth of its norm."
        ),
    ),
)  # fmt: skip

EXPLODING_GRADIENTS = CauseEntry(
    cause="exploding_gradients",
    happened="The gradient norm left its own history upward and stayed there, and no better-fitting cause was found.",
    mechanism=(
        "Gradients are products over the layers: once some factors pass one by a little, the product passes it by a lot. Bad batches, weights "
        "that have grown, a normalisation that lost its statistics or a recurrent path set it off; each large step makes the next one larger."
    ),
    would_refute="The norm came back into its history by itself within a few steps.",
    refuting_fact="came_back",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "the gradient norm had left its history"),
    rows=(
        Row("gradient_explosion", 0.85, "observation", seen=("has_loss_reaction",)),
        Row("gradient_explosion", 0.75, "observation", absent=("has_loss_reaction",)),
        Row("gradient_explosion", 0.60, "inference", missing=_NO_CAUSE),
    ),
    fix=Fix(
        do=(
            "Resume from a checkpoint that is older than the step named here, with the gradient norm clipped at two or three times its usual "
            "value (`clip_grad_norm_`). Before that look at the batches of that step, and at the modules named here."
        ),
        changes="The length of steps whose gradient is unusually large; all others stay as they are.",
        does_not_fix="What set it off. A clip that acts at every step is a smaller learning rate under another name.",
        expect="The norm before the clip passes that step and is back at its usual value within a few steps.",
        verify="`holter report` stays empty past that step, and the clip acts at few steps.",
        otherwise=(
            "If it explodes at the same step again, it is that step's data; at another step, it is the weights: lower the learning rate, "
            "and look whose weight norms grow. With fp16 use bf16."
        ),
    ),
)  # fmt: skip

VANISHING_GRADIENTS = CauseEntry(
    cause="vanishing_gradients",
    happened="Some trained modules get gradients that are too small to learn from.",
    mechanism=(
        "Between these modules and the loss each layer multiplies the gradient by less than one: saturated sigmoid or tanh, small "
        "initial weights, many layers without a residual path. What arrives is below what the weights' dtype can add."
    ),
    would_refute="The gradients of these modules grow from check to check: a gate or an adapter that begins at zero opens.",
    refuting_fact="is_growing",
    is_refuted_by=True,
    rows=(
        Row("gradient_vanishing", 0.85, "observation", seen=("is_from_start",)),
        Row("gradient_vanishing", 0.80, "observation", missing=_NO_CAUSE),
    ),
    fix=Fix(
        do=(
            "Go from the loss towards the named modules and find where the norm drops: that layer's activation, scale or initialisation is "
            "the reason. Use residual paths and normalisation, ReLU or GELU instead of sigmoid, an initialisation that fits the activation. Start anew: "
            "the named modules have learned nothing."
        ),
        changes="The model's signal path, and so its results from the first step on.",
        does_not_fix="A higher learning rate does not help: the other modules would get it too. Adam rescales small gradients, and their noise with them.",
        expect="Gradient norms of all modules within a factor of a thousand of each other in the first steps.",
        verify="`p.grad.norm()` of the named modules is above 1e-6 after one backward pass.",
        otherwise=(
            "If the modules are meant to hardly learn (a gate at zero, a tiny layer scale), freeze them or ignore this. If gradients are "
            "tiny only in fp16, scale the loss."
        ),
    ),
)  # fmt: skip

IMBALANCED_GRADIENTS = CauseEntry(
    cause="imbalanced_gradients",
    happened="One module's gradient is more than a hundred times larger or smaller than its peers', and was not before.",
    mechanism=(
        "One path through the model began to dominate: a loss term or a head whose scale ran away, an embedding that rare inputs hit, a "
        "normalisation with hardly any variance left, which divides by it in the backward pass. Clipping by the global norm then shrinks "
        "everybody else's gradient with it."
    ),
    would_refute="The same ratio was there in the beginning of the run: then it is how this model is built.",
    refuting_fact="was_so_before",
    is_refuted_by=True,
    rows=(
        Row("gradient_balance", 0.85, "observation", seen=("is_above",)),
        Row("gradient_balance", 0.75, "observation", missing=_NO_CAUSE),
    ),
    fix=Fix(
        do=(
            "Look at the named module at the step named here: its inputs' scale and variance, its weight norm, the loss term that ends in it. "
            "Bring that back into range (weight of the term, epsilon of the normalisation, weight decay); if need be clip this module by "
            "itself."
        ),
        changes="One module's share of the step. With a clip by global norm all other modules get larger steps again.",
        does_not_fix="What the others did not learn since that step.",
        expect="The module's norm, compared with its peers', is again within ten times of what it was.",
        verify="The ratio in the evidence is back under ten times its beginning after some checks.",
        otherwise="If the module is new or was re-initialised on purpose, give it a learning rate of its own and let it settle.",
    ),
)  # fmt: skip

LOSS_DIVERGENCE = CauseEntry(
    cause="loss_divergence",
    happened="The loss rose far above its best stretch and does not come back, and no better-fitting cause was found.",
    mechanism=(
        "The weights were moved to a place from which the descent does not lead back: by steps that are too large, by data of another "
        "kind, by a state that was lost on resuming, or by numbers that lost their precision. The steps since then are lost time."
    ),
    would_refute="The loss came back to its best level by itself.",
    refuting_fact="came_back",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "the loss had left its course"),
    passes_after_steps=_STEPS_OF_A_RISE,
    is_measured_against_the_past=True,
    rows=(
        Row("loss_trend", 0.85, "observation", seen=("is_rising",)),
        Row("loss_trend", 0.10, "inference", missing=_NO_CAUSE),
    ),
    fix=Fix(
        do=(
            "Go back to a checkpoint that is older than the step named here. Before resuming compare the steps before it with those after: "
            "learning rate, gradient norm, order and kind of the data, what was resumed or unfrozen. If nothing differs, resume with half "
            "the learning rate."
        ),
        changes="The steps since then are thrown away; with a lower rate progress is slower.",
        does_not_fix="Waiting does not help: the loss has stayed up for as long as the evidence says.",
        expect="The resumed run passes that step at the level of its best stretch.",
        verify="The loss 50 steps after that step is within the noise of the best stretch.",
        otherwise=(
            "If it diverges at the same step again, skip that stretch of data. If it diverges at other steps, look at precision: fp32 for "
            "softmax, normalisation and the optimizer's state; a larger epsilon for Adam."
        ),
    ),
)  # fmt: skip

LOSS_PLATEAU = CauseEntry(
    cause="loss_plateau",
    happened="The loss has not moved for hundreds of steps, and no better-fitting cause was found.",
    mechanism=(
        "Either there is nothing to learn (labels that do not depend on the inputs, inputs that do not reach the model), or steps are too "
        "small, or the model predicts the average and finds no way out. A loss of log(number of classes) is that of guessing."
    ),
    would_refute="The trend moves more than its noise.",
    refuting_fact="is_still",
    is_refuted_by=False,
    passes_after_steps=_STEPS_OF_A_RISE,
    rows=(
        Row("loss_trend", 0.85, "observation", seen=("is_still", "is_at_guessing"), absent=("is_rising",)),
        Row("loss_trend", 0.75, "observation", seen=("is_still",), absent=("is_rising",)),
    ),
    fix=Fix(
        do=(
            "Train on one single batch until its loss is near zero. If that works, the model can learn: look at the data, and at how inputs "
            "and labels are paired. If it does not, raise the learning rate tenfold for a test, and see that every parameter is in the "
            "optimizer."
        ),
        changes="Nothing yet: these are tests.",
        does_not_fix="What keeps the loss where it is. Waiting longer rarely helps.",
        expect="One batch is learnt by heart within a few hundred steps.",
        verify="The loss leaves the level in the evidence by more than its noise.",
        otherwise="If one batch is learnt and the data is sound, the run may simply have converged: compare with what others reach.",
    ),
)  # fmt: skip

OVERFITTING = CauseEntry(
    cause="overfitting",
    happened="The training loss falls while the evaluation loss rises.",
    mechanism=(
        "The model has learnt what training and evaluation data share, and now learns what only the training data holds, noise and labels "
        "by heart. Too few samples for so many parameters, too many epochs, or too little regularisation."
    ),
    would_refute="The training loss rises as well, or does not fall: then it is divergence, or other evaluation data.",
    refuting_fact="is_training_falling",
    is_refuted_by=False,
    rows=(
        Row("overfitting", 0.90, "observation", seen=("is_training_falling", "is_evaluation_rising")),
        Row("overfitting", 0.40, "inference", missing="the training loss over the same steps"),
    ),
    fix=Fix(
        do=(
            "Keep the checkpoint of the best evaluation, whose step is named here, and stop. To get further: more or augmented data, "
            "dropout, weight decay, a smaller model, fewer epochs."
        ),
        changes="Which weights you keep. Regularisation raises the training loss; that is its purpose.",
        does_not_fix="A longer run makes it worse.",
        expect="With regularisation the evaluation loss reaches a lower minimum, later.",
        verify="The evaluation loss of the kept checkpoint is the lowest of the run.",
        otherwise=(
            "If evaluation metrics other than the loss still improve, the model grows overconfident rather than worse: label smoothing or "
            "calibration may do. If it rises from the first epoch on, look for training samples in another format than evaluation's."
        ),
    ),
)  # fmt: skip

DOMINATING_LOSS_TERM = CauseEntry(
    cause="dominating_loss_term",
    happened="One term of the loss outweighs all others together, or one is exactly zero.",
    mechanism=(
        "The gradient of a sum is the sum of the gradients: a term a hundred times the others leaves them a hundredth of each step. A "
        "term of exactly zero teaches nothing: its weight is zero, its mask is empty, it was computed from detached tensors, or a sum was taken "
        "where a mean was meant."
    ),
    would_refute="The small term's share grows: a schedule of weights is at work.",
    refuting_fact="is_growing",
    is_refuted_by=True,
    rows=(
        Row("loss_terms", 0.90, "observation", seen=("is_zero",), absent=("is_zero_from_start",)),
        Row("loss_terms", 0.85, "observation", seen=("is_dominating",)),
        Row("loss_terms", 0.65, "inference", missing="the schedule of the terms' weights: a term may be meant to begin later"),
    ),
    fix=Fix(
        do=(
            "Compare the terms' magnitudes in the evidence with their weights. Give all terms the same reduction (mean, not sum), then choose "
            "weights so that each contributes as you mean it to. For a term of zero check its mask, its weight and `requires_grad`."
        ),
        changes="The balance of what is learnt, and the value of the total loss: curves before and after cannot be compared.",
        does_not_fix="What the neglected term should have taught so far.",
        expect="Terms within a factor of a hundred of each other, none exactly zero for long.",
        verify="The gradient norms of each term alone, at one step, are of the same order.",
        otherwise="If a term is meant to be switched on later, or is a hinge that is satisfied, ignore this.",
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(LearningRate(), Stage.RATE_SET),
        DetectorEntry(NonfiniteValues(), Stage.BACKWARD, incident_per="event", sees_damage=True),
        DetectorEntry(NonfiniteLoss(), Stage.BACKWARD, "curves"),
        DetectorEntry(LossTerms(), Stage.CURVE, "logged", tried_on="made-up windows"),
        DetectorEntry(GradientVanishing(), Stage.CURVE, "curves", tried_on="made-up windows"),
        DetectorEntry(GradientBalance(), Stage.CURVE, "curves", tried_on="made-up windows"),
        DetectorEntry(GradientExplosion(), Stage.CURVE, "curves"),
        DetectorEntry(Overfitting(), Stage.CURVE, "curves"),
        DetectorEntry(LossTrend(), Stage.CURVE, "curves"),
    ),
    causes=(
        NONFINITE_INPUT, NONFINITE_FORWARD, NONFINITE_LOSS_FUNCTION, NONFINITE_BACKWARD, ACTIVATION_OVERFLOW, HIDDEN_NONFINITE_LOSS,
        LEARNING_RATE_TOO_HIGH, EXPLODING_GRADIENTS, VANISHING_GRADIENTS, IMBALANCED_GRADIENTS, LOSS_DIVERGENCE, LOSS_PLATEAU,
        OVERFITTING, DOMINATING_LOSS_TERM,
    ),
    brings_about=(
        # NaN in the weights makes everything computed from them NaN, possibly with different bits, and a script may stop because of it.
        Consequence("nonfinite_values", ("nonfinite_values", "replica_divergence", "buffer_divergence", "batch_values", "gradient_range", "skipped_steps", "learning_rate"), ("logged", "weights", "curves")),
        Consequence("nonfinite_values", ("dead_rank",), unless_follower_has=NOT_BY_A_NUMBER),
        Consequence("nonfinite_loss", ("loss_trend", "overfitting", "loss_terms")),
        # A step that is too large, or grows unintentionally.
        Consequence("learning_rate", ("nonfinite_values", "missing_gradients", "still_weights", "skipped_steps", "batch_values"), ("logged", "curves"), unless_follower_is=("nonfinite_input",)),
        Consequence("learning_rate", ("dead_rank",), unless_follower_has=NOT_BY_A_NUMBER),
        Consequence("gradient_explosion", ("loss_trend", "gradient_balance", "nonfinite_loss", "learning_rate")),
        Consequence("gradient_explosion", ("nonfinite_values",), unless_follower_is=("nonfinite_input", "nonfinite_forward")),
        Consequence("loss_terms", ("gradient_explosion", "gradient_balance", "loss_trend")),
        Consequence("loss_trend", ("gradient_explosion", "gradient_balance", "overfitting")),
    ),
)  # fmt: skip
