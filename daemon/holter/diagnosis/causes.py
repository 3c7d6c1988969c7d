"""The catalogue of causes that can be named: what happened, how it comes about, what would refute it, and what to do.

The slugs are public. Each entry is also a page (`holter explain nonfinite_input`), so it is written to be read by somebody who was
just woken, without the code at hand.
"""

from dataclasses import dataclass

from holter.records import Fix


@dataclass(frozen=True)
class CauseEntry:
    """One cause, as everyone names it."""

    cause: str
    happened: str
    """One sentence."""
    mechanism: str
    would_refute: str
    """One sentence: which observation would disprove it."""
    refuting_fact: str
    """The fact that tells whether that observation was made."""
    is_refuted_by: bool
    """The value of that fact which refutes."""
    fix: Fix


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

UNSYNCED_INITIALISATION = CauseEntry(
    cause="unsynced_initialisation",
    happened="Replicas did not start from the same weights.",
    mechanism=(
        "Each rank built its model from its own random state, or loaded other weights, and nothing broadcast rank 0's. Equal gradients "
        "are then added to different weights, so that the distance stays for the whole run while the loss looks ordinary."
    ),
    would_refute="The ranks' parameters were equal when they were first compared.",
    refuting_fact="parameters_differ_at_first",
    is_refuted_by=False,
    fix=Fix(
        do=(
            "Restart from the beginning with the same weights on all ranks: leave DDP's broadcast on (`init_sync=True`, the default), or "
            "seed all ranks alike while the model is built, or load the same checkpoint on each before wrapping."
        ),
        changes="The starting weights of all ranks but one.",
        does_not_fix="The run so far. Its gradients were averages over different models; broadcasting now keeps one rank's weights and that history.",
        expect="Parameters agree at step 0 and at every step after.",
        verify="The restarted run reports equal parameters at its first comparison; `holter report` stays empty.",
        otherwise=(
            "If the seed is the same and the broadcast is on, a rank changes its weights after wrapping: look for loading, "
            "re-initialising or resizing that only some ranks do."
        ),
    ),
)

GRADIENT_SYNC_BYPASSED = CauseEntry(
    cause="gradient_sync_bypassed",
    happened="Gradients are not reduced between ranks: each rank trains a model of its own.",
    mechanism=(
        "The reduction hangs on hooks of the wrapper's parameters and on calling the wrapper. Calling `model.module`, converting the "
        "wrapped model (`.double()`, `.to()`, which replaces the parameters that have the hooks), or stepping on a micro-batch that ran "
        "inside `no_sync` leaves every gradient local. Nothing raises."
    ),
    would_refute="The reduced gradients agreed between ranks at any step that was compared.",
    refuting_fact="gradients_differ_always",
    is_refuted_by=False,
    fix=Fix(
        do=(
            "Call the wrapper, not the module inside it, in the step that precedes `optimizer.step()`. Do every conversion of dtype or "
            "device before wrapping. Make sure that the last micro-batch of an accumulation runs outside `no_sync`. Restart."
        ),
        changes="Gradients become averages over all ranks: the effective batch grows by the number of ranks, so check the learning rate.",
        does_not_fix="The run so far: each rank has trained on its own share of the data only, and averaging their weights now is no substitute.",
        expect="Reduced gradients and parameters agree at each step; a step takes longer by the time of the reduction.",
        verify="The restarted run reports equal gradients from its first step.",
        otherwise=(
            "If the wrapper is called and nothing was converted, look for a communication hook that does not reduce, or for ranks that "
            "are each alone in their process group."
        ),
    ),
)

SILENT_DATA_CORRUPTION = CauseEntry(
    cause="silent_data_corruption",
    happened="Bits of a tensor changed on a rank with no optimizer step that could have changed them.",
    mechanism=(
        "A memory or compute error, or a stray write by some code, changed weights on one rank. The reduced gradients still agree, so "
        "every later step adds the same update to a different weight: the damage stays, and the loss hardly shows it."
    ),
    would_refute="The reduced gradients had differed before the parameters did: then the update, not the memory, was different.",
    refuting_fact="gradients_differ",
    is_refuted_by=True,
    fix=Fix(
        do=(
            "Take the named rank's host out of the job (if several are named, one of them is it): read its kernel log (EDAC, machine "
            "checks) and its device's ECC and row-remap counters, and run a memory test. Resume elsewhere from a checkpoint that is older "
            "than this step."
        ),
        changes="Which machine runs this rank. The training code stays as it is.",
        does_not_fix="Weights saved from the named rank since this step. If that is rank 0, checkpoints after this step hold the damage.",
        expect="On another host the same steps keep all ranks equal.",
        verify="Replay past this step from the older checkpoint: parameters agree, and no rank's weights change between two steps.",
        otherwise=(
            "If it comes back on other hardware at the same step, it is code: look for something that only this rank runs between two "
            "steps and that writes to parameters (loading, averaging, pruning, evaluation with swapped weights)."
        ),
    ),
)

RANK_DEAD = CauseEntry(
    cause="rank_dead",
    happened="A rank's process ended before the training was done.",
    mechanism=(
        "The process was killed, crashed in native code, or left with an error. Its peers then fail too: those in a collective get "
        "connection errors or wait until their timeout, and the launcher ends the rest with SIGTERM. Only the first death has a cause."
    ),
    would_refute="Another rank ended before the named one, and neither by SIGTERM nor over a lost connection.",
    refuting_fact="has_earlier_death",
    is_refuted_by=True,
    fix=Fix(
        do=(
            "Read the named rank's own log around its last line, and no other rank's. SIGKILL: ask the kernel (`dmesg -T | grep -i kill`) "
            "and the scheduler who sent it; most often memory ran out. SIGSEGV, SIGBUS, SIGABRT: native code, look for a core dump. "
            "An exception: its text and line are in the evidence. Then resume from the last good checkpoint."
        ),
        changes="Nothing in the numbers: steps since the last checkpoint are run again, nothing else is lost.",
        does_not_fix="What ended the process, if it is resumed unchanged: it may well die at the same place again.",
        expect="The resumed run passes this step with all ranks alive.",
        verify="`holter status` shows every rank past this step.",
        otherwise=(
            "If it dies again on the same host and not on others, suspect the host; at the same step on any host, suspect that step's "
            "data or code; at changing steps with growing memory, a leak."
        ),
    ),
)

ALL: tuple[CauseEntry, ...] = (
    NONFINITE_INPUT,
    NONFINITE_FORWARD,
    NONFINITE_BACKWARD,
    UNSYNCED_INITIALISATION,
    GRADIENT_SYNC_BYPASSED,
    SILENT_DATA_CORRUPTION,
    RANK_DEAD,
)

BY_NAME = {entry.cause: entry for entry in ALL}
