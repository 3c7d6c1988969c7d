"""Numbers that are not numbers, and losses that go wrong."""

from holter.diagnosis.causes.entry import CauseEntry
from holter.records import Fix

NONFINITE_INPUT = CauseEntry(
    cause="nonfinite_input",
    happened="A batch held NaN or Inf, and the step made from it was applied to the weights.",
    mechanism=(
        "NaN in a batch passes through the forward pass into that rank's loss and gradients. The reduction then adds that rank's "
        "gradients to everyone's, and the optimizer writes NaN into the weights of every rank in the same step."
    ),
    would_refute="The named rank's own gradients were finite in spite of its batch.",
    refuting_fact="has_nonfinite_gradient",
    is_refuted_by=False,
    fix=Fix(
        do=(
            "Stop the run. Load this step's batch again on the named rank (same seed, epoch and index), find the bad sample in the "
            "tensors named here, repair or drop it, and make the data loader reject batches that are not finite. Resume from a "
            "checkpoint that is older than this step."
        ),
        changes="One sample, or the code that makes it. Model, optimizer and schedule stay as they are.",
        does_not_fix=(
            "The weights: they have been NaN on every rank since this step. Clipping, a lower learning rate or skipping the next "
            "batches bring nothing back, and checkpoints written after this step are lost."
        ),
        expect="The resumed run passes this step with a finite loss and continues the old curve.",
        verify="`torch.isfinite(x).all()` holds for the batch of this step on this rank, and no new incident is opened at this step.",
        otherwise=(
            "If the sample on disk is finite, it was spoiled on the way: a normalisation by a deviation of zero, a log of zero, a cast "
            "to half precision, an uninitialised buffer in a loader's worker. Run transforms and collate on it alone."
        ),
    ),
)

NONFINITE_FORWARD = CauseEntry(
    cause="nonfinite_forward",
    happened="The forward pass made NaN or Inf out of a finite batch, and the step was applied to the weights.",
    mechanism=(
        "A module overflowed its dtype, divided by zero, took the log or root of a value outside its domain, or normalised something "
        "without spread. The loss became NaN on that rank; the reduction carried it to all."
    ),
    would_refute="The batch itself held NaN or Inf.",
    refuting_fact="has_nonfinite_input",
    is_refuted_by=True,
    fix=Fix(
        do=(
            "Stop the run. Look at the named module with this step's batch: largest input against its dtype's limit (65504 for fp16), "
            "divisions, logs, roots, softmax over a row that is masked entirely. Guard that operation (an epsilon, fp32 for this "
            "module, a clamp on its input) and resume from a checkpoint that is older than this step."
        ),
        changes="The arithmetic of one module. A clamp or an epsilon changes results slightly; fp32 costs memory there.",
        does_not_fix="The weights, NaN on every rank since this step; nor growth that led here, if the values had been rising for many steps.",
        expect="The replayed step has a finite loss, and the module's largest output stays well under its dtype's limit.",
        verify="Replay the batch of this step from the older checkpoint: every module's output is finite.",
        otherwise=(
            "If all ranks had it at the same step, the weights were already bad: look at the gradient norm and learning rate of the "
            "steps before. If the replay makes no NaN, it came from outside the model: the loss function, or the labels."
        ),
    ),
)

NONFINITE_BACKWARD = CauseEntry(
    cause="nonfinite_backward",
    happened="Batch and loss were finite, a gradient was not, and the step was applied to the weights.",
    mechanism=(
        "The derivative of an operation is infinite or undefined where its value is not: a root or a norm at zero, `where` around a "
        "branch that holds NaN, a division by a tiny number, an overflow of fp16 gradients without a loss scaler."
    ),
    would_refute="The loss itself was NaN or Inf.",
    refuting_fact="has_nonfinite_loss",
    is_refuted_by=True,
    fix=Fix(
        do=(
            "Stop the run. Start from the first tensor named here: backward runs from the loss to the input, so what broke lies in its "
            "module or just behind it. Look there for sqrt, norm, log, division, `where`, a custom backward; put the guard inside the "
            "operation (`sqrt(x + eps)`), not around its result. Resume from a checkpoint that is older than this step."
        ),
        changes="The derivative of one operation near its singular point; forward results change by at most the epsilon.",
        does_not_fix="The weights, NaN on every rank since this step. `nan_to_num` on gradients would hide the next one, not prevent it.",
        expect="All gradients of this step are finite when its batch is replayed.",
        verify="Run this step's batch under `torch.autograd.set_detect_anomaly(True)`: it raises no error.",
        otherwise=(
            "With fp16 and no loss scaler, use one or bf16. If only the reduced gradient is not finite while every rank's own is, the "
            "sum overflowed in the reduction: reduce in fp32, or divide before reducing."
        ),
    ),
)

CAUSES: tuple[CauseEntry, ...] = (NONFINITE_INPUT, NONFINITE_FORWARD, NONFINITE_BACKWARD)
