"""Ranks that should be equal and are not."""

from holter.diagnosis.causes.entry import CauseEntry
from holter.records import Fix

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

CAUSES: tuple[CauseEntry, ...] = (UNSYNCED_INITIALISATION, GRADIENT_SYNC_BYPASSED, SILENT_DATA_CORRUPTION)
