"""Ranks that should be equal and are not."""

from holter.faults.family import (
    NOT_BY_A_NUMBER,
    NOT_BY_A_SCRIPT,
    CauseEntry,
    Consequence,
    Damage,
    DetectorEntry,
    Family,
    Row,
    Stage,
)
from holter.faults.replicas.applied_scale import AppliedScale
from holter.faults.replicas.buffer_divergence import BufferDivergence
from holter.faults.replicas.gradient_scale import GradientScale
from holter.faults.replicas.rank_shares import RankShares
from holter.faults.replicas.replica_divergence import ReplicaDivergence
from holter.faults.replicas.shard_clipping import ShardClipping
from holter.faults.replicas.shard_history import ShardHistory
from holter.faults.replicas.starting_parts import StartingParts
from holter.faults.replicas.structure_mismatch import StructureMismatch
from holter.records import Fix

_REPLICAS_DIFFER = Damage(
    "before the step", "suspect", "replicas hold different weights, and the files hold one rank's"
)
_NO_TIE_BREAK = (
    "something to tell the sound side from the damaged one: the ranks' own history across this step, a third replica, or a "
    "checkpoint with fingerprints; without it all ranks that differ are named"
)
_NO_TABLES = "the ranks' tables of fingerprints, to tell all tensors from a few"
_NO_GRADIENTS = "a comparison of the reduced gradients"
_NO_PARAMETERS = "a comparison of the parameters at the start"
_NO_STATE = "the optimizers' learning rates, step counts and states, compared between ranks"
_NO_SECOND = "a second comparison: gradients that differ once point to a faulty collective, gradients that differ ever since are not reduced"
_NO_REDUCED = "the gradients as the reduction left them: parameters outside the reducer and a clip that not all ranks apply look alike here"
_NO_MOMENT = "a comparison of gradients and moments at the very step at which the weights parted"
_NO_DISTANCE = "how the distance between the ranks grows over the next comparisons"

UNSYNCED_INITIALISATION = CauseEntry(
    cause="unsynced_initialisation",
    happened="Replicas did not start from the same weights, or were given others of their own.",
    mechanism=(
        "Each rank built its model from its own random state, or loaded other weights, and nothing broadcast rank 0's. Equal gradients "
        "are then added to different weights, so that the distance stays for the whole run while the loss looks ordinary. So it is with a "
        "layer that is initialised anew in the middle of a run, on each rank from its own random state."
    ),
    would_refute="The ranks' parameters were equal when they were first compared, and no script set them anew.",
    refuting_fact="were_set_apart",
    is_refuted_by=False,
    damage=_REPLICAS_DIFFER,
    rows=(
        Row("replica_divergence", 0.95, "observation", seen=("parameters_differ_at_first",), absent=("gradients_differ",), unless=("own_history_broke_on_some", "is_one_side_rounded"), names="everyone", tensors="parameters"),
        Row("replica_divergence", 0.85, "documented", seen=("parameters_differ_at_first", "gradients_differ"), unless=("own_history_broke_on_some", "is_one_side_rounded"), names="everyone", tensors="parameters"),
        Row("replica_divergence", 0.80, "documented", seen=("parameters_differ_at_first",), unknown=("gradients_differ",), unless=("own_history_broke_on_some", "is_one_side_rounded"), names="everyone", tensors="parameters"),
        Row("replica_divergence", 0.90, "observation", seen=("were_all_set_at_once",), absent=("parameters_differ_at_first", "gradients_differ"), unless=("parameters_parted_within_a_step", "given_gradients_differ", "hyperparameters_differ", "optimizer_state_differs"), names="everyone", tensors="parameters"),
        Row("replica_divergence", 0.40, "inference", seen=("parameters_differ_at_first",), names="everyone", tensors="parameters", missing=_NO_TIE_BREAK),
        Row("replica_divergence", 0.40, "inference", seen=("parameters_differ",), unknown=("parameters_differ_at_first",), unless=("gradients_differ",), names="everyone", tensors="parameters", missing=_NO_PARAMETERS),
    ),
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
)  # fmt: skip

GRADIENT_SYNC_BYPASSED = CauseEntry(
    cause="gradient_sync_bypassed",
    happened="Gradients are not reduced between ranks: each rank trains a model of its own.",
    mechanism=(
        "The reduction hangs on hooks of the wrapper's parameters and on calling the wrapper. Calling `model.module`, converting the "
        "wrapped model (`.double()`, `.to()`, which replaces the parameters that have the hooks), or stepping on a micro-batch that ran "
        "inside `no_sync` leaves every gradient local. A further backward pass after the last one that reduces adds what is local to what all ranks "
        "have in common. Nothing raises."
    ),
    would_refute="The reduced gradients agreed between ranks again at a later step.",
    refuting_fact="gradients_differ_once",
    is_refuted_by=True,
    damage=_REPLICAS_DIFFER,
    rows=(
        Row("replica_divergence", 0.95, "observation", seen=("gradients_differ_always", "gradients_differ_in_all_tensors", "gradients_differ_repeatedly"), absent=("parameters_differ_at_first",), unless=("has_unused_parameter", "is_distance_tiny"), names="everyone", tensors="gradients"),
        Row("replica_divergence", 0.90, "observation", seen=("gradients_differ_always", "gradients_differ_in_all_tensors"), unless=("has_unused_parameter", "is_distance_tiny"), names="everyone", tensors="gradients"),
        Row("replica_divergence", 0.93, "observation", seen=("gradients_differ_ever_since", "gradients_differ_in_all_tensors"), unless=("has_unused_parameter", "is_distance_tiny"), names="everyone", tensors="gradients"),
        Row("replica_divergence", 0.93, "observation", seen=("given_gradients_differ", "is_added_to"), absent=("gradients_differ",), unless=("loss_scales_differ", "is_distance_tiny", "is_result_lost_once"), tensors="gradients"),
        Row("replica_divergence", 0.65, "inference", seen=("gradients_differ", "gradients_differ_in_all_tensors"), unless=("has_unused_parameter", "is_distance_tiny", "gradients_differ_once"), names="everyone", tensors="gradients", missing=_NO_SECOND),
        Row("replica_divergence", 0.65, "inference", seen=("gradients_differ_always",), unknown=("gradients_differ_in_all_tensors",), names="everyone", tensors="gradients", missing=_NO_TABLES),
        Row("replica_divergence", 0.30, "inference", seen=("gradients_differ",), names="everyone", tensors="gradients", missing=_NO_TABLES),
    ),
    fix=Fix(
        do=(
            "Call the wrapper, not the module inside it, in the step that precedes `optimizer.step()`. Do every conversion of dtype or "
            "device before wrapping. Make sure that the last backward pass before the step runs outside `no_sync`. Restart."
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
)  # fmt: skip

NONDETERMINISTIC_DRIFT = CauseEntry(
    cause="nondeterministic_drift",
    happened="Replicas part slowly, by rounding.",
    mechanism=(
        "Sums of floats depend on their order. A reduction that each rank does in an order of its own (gather and add, a tree that is rooted "
        "differently), or kernels that differ between devices, give results that differ in the last bits, and nothing brings them together again."
    ),
    would_refute="The distance between the ranks is more than rounding makes.",
    refuting_fact="is_distance_tiny",
    is_refuted_by=False,
    damage=Damage("before the step", "suspect", "replicas part slowly, and the files hold one rank's weights"),
    rows=(
        Row("replica_divergence", 0.85, "documented", seen=("is_distance_tiny", "gradients_differ_repeatedly"), absent=("parameters_differ_at_first",), unless=("is_one_side_rounded",), names="everyone", tensors="gradients"),
        Row("replica_divergence", 0.80, "documented", seen=("is_distance_tiny", "given_gradients_differ"), absent=("parameters_differ_at_first", "gradients_differ"), unless=("is_one_side_rounded",), names="everyone", tensors="gradients"),
        Row("replica_divergence", 0.68, "inference", seen=("is_distance_tiny", "gradients_differ"), absent=("parameters_differ_at_first",), unless=("is_one_side_rounded",), names="everyone", tensors="gradients", missing=_NO_DISTANCE),
        Row("replica_divergence", 0.65, "inference", seen=("is_distance_tiny", "parameters_differ_in_all_tensors"), absent=("parameters_differ_at_first", "gradients_differ"), unless=("is_one_side_rounded", "hyperparameters_differ", "optimizer_state_differs", "given_gradients_differ", "own_history_broke_on_some"), names="everyone", tensors="parameters", missing=_NO_DISTANCE),
    ),
    fix=Fix(
        do=(
            "Reduce with `all_reduce`, which gives all ranks the same bits, instead of gathering and adding; use the same device, library "
            "versions and algorithm settings on all ranks. To go on with this run: broadcast rank 0's parameters now, and then every few hundred steps."
        ),
        changes="The last bits of the gradients.",
        does_not_fix="The distance so far: only a broadcast removes it.",
        expect="Fingerprints agree at each comparison.",
        verify="Gradients and parameters agree from the first comparison of a new run.",
        otherwise="If the distance jumps instead of growing, it is not rounding: look at the step at which it jumped.",
    ),
)  # fmt: skip

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
    damage=Damage("before the step", "poisoned", "bits of the weights changed with no step that could have changed them, and every gradient since has them in it"),
    rows=(
        Row("replica_divergence", 0.93, "observation", seen=("own_history_broke_on_some",), absent=("gradients_differ", "parameters_differ_in_all_tensors"), unless=("given_gradients_differ", "hyperparameters_differ"), tensors="parameters"),
        Row("replica_divergence", 0.85, "documented", seen=("own_history_broke_on_some",), unless=("gradients_differ", "parameters_differ_in_all_tensors"), tensors="parameters"),
        Row("replica_divergence", 0.80, "documented", seen=("own_history_broke_on_some",), absent=("gradients_differ",), tensors="parameters"),
        Row("replica_divergence", 0.75, "documented", seen=("own_history_broke_on_some",), tensors="parameters"),
        Row("replica_divergence", 0.80, "documented", seen=("is_culprit_known",), absent=("parameters_differ_at_first", "gradients_differ", "parameters_differ_in_all_tensors"), unless=("parameters_parted_within_a_step", "given_gradients_differ", "hyperparameters_differ", "optimizer_state_differs"), tensors="parameters"),
        Row("replica_divergence", 0.60, "inference", absent=("parameters_differ_at_first", "gradients_differ", "parameters_differ_in_all_tensors"), unless=("parameters_parted_within_a_step", "given_gradients_differ", "hyperparameters_differ", "optimizer_state_differs", "were_all_set_at_once"), tensors="parameters", missing=_NO_TIE_BREAK),
        Row("replica_divergence", 0.50, "inference", seen=("parameters_parted_within_a_step",), absent=("parameters_differ_at_first", "gradients_differ"), unless=("given_gradients_differ", "hyperparameters_differ", "optimizer_state_differs"), tensors="parameters", missing=_NO_STATE),
        Row("replica_divergence", 0.45, "inference", seen=("parameters_differ",), absent=("parameters_differ_at_first",), unless=("gradients_differ", "given_gradients_differ", "hyperparameters_differ", "optimizer_state_differs"), tensors="parameters", missing=_NO_GRADIENTS + ", and " + _NO_TABLES),
        Row("replica_divergence", 0.45, "inference", seen=("gradients_differ",), absent=("gradients_differ_always", "gradients_differ_ever_since"), missing="the collective's result on each rank: gradients differed at some steps and agreed at others"),
        Row("replica_divergence", 0.10, "inference", missing=_NO_TIE_BREAK),
        Row("shard_history", 0.93, "observation", seen=("own_history_broke_on_some",), absent=("own_history_broke_on_all",)),
        Row("shard_history", 0.10, "inference", missing="whether the shards of the other ranks stayed as they were"),
        Row("frozen_divergence", 0.85, "documented", seen=("own_history_broke_on_some", "did_agree_before")),
        Row("frozen_divergence", 0.50, "inference", seen=("did_agree_before",), missing="the tensors' fingerprints from before, on both sides"),
    ),
    fix=Fix(
        do=(
            "Take the named rank's host out of the job (if several are named, it is one of them): read its kernel log (EDAC, machine "
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
)  # fmt: skip

UNREDUCED_PARAMETERS = CauseEntry(
    cause="unreduced_parameters",
    happened="Some parameters are in no reduction: each rank trains them on its own data alone.",
    mechanism=(
        "The wrapper notes which parameters train when it is built, and sorts them into buckets that are reduced when each of their "
        "gradients has come. A parameter that is unfrozen later is in no bucket. A parameter that gets no gradient keeps its bucket "
        "waiting, and all that shares the bucket stays local, unless the wrapper was told to find unused parameters."
    ),
    would_refute="The reduced gradients differ in all tensors: then nothing is reduced, for another reason.",
    refuting_fact="gradients_differ_in_all_tensors",
    is_refuted_by=True,
    damage=_REPLICAS_DIFFER,
    rows=(
        Row("replica_divergence", 0.93, "observation", seen=("gradients_differ_ever_since", "is_reduction_seen"), absent=("gradients_differ_in_all_tensors",), unless=("is_distance_tiny", "is_randomness_apart"), names="everyone", tensors="gradients"),
        Row("replica_divergence", 0.93, "observation", seen=("gradients_differ", "has_unused_parameter"), unless=("is_distance_tiny", "gradients_differ_once"), names="everyone", tensors="gradients"),
        Row("replica_divergence", 0.90, "observation", seen=("gradients_differ", "were_frozen_before"), unless=("is_distance_tiny", "gradients_differ_once"), names="everyone", tensors="gradients"),
        Row("replica_divergence", 0.85, "documented", seen=("gradients_differ_always",), absent=("gradients_differ_in_all_tensors",), unless=("is_distance_tiny", "is_randomness_apart"), names="everyone", tensors="gradients"),
        Row("replica_divergence", 0.80, "documented", seen=("gradients_differ_ever_since",), absent=("gradients_differ_in_all_tensors",), unless=("is_distance_tiny", "is_randomness_apart"), names="everyone", tensors="gradients"),
        Row("replica_divergence", 0.60, "inference", seen=("gradients_differ",), absent=("gradients_differ_in_all_tensors",), unless=("is_distance_tiny", "gradients_differ_once"), names="everyone", tensors="gradients", missing=_NO_SECOND),
        Row("starting_parts", 0.80, "documented", seen=("are_ties_parted",)),
    ),
    fix=Fix(
        do=(
            "Freeze and unfreeze before wrapping, and wrap anew after a layer was unfrozen. Remove parameters that the forward pass never "
            "uses, or freeze them, or pass `find_unused_parameters=True`. Restart, or resume from a checkpoint older than this step."
        ),
        changes="The named tensors get averaged gradients; with `find_unused_parameters` each step walks the graph once more.",
        does_not_fix="The named tensors as they are: they have grown apart, and rank 0's copy has seen its own share of the data only.",
        expect="Reduced gradients of the named tensors agree at each comparison.",
        verify="The restarted run reports no difference at its first comparison, and the unused parameters are gone from the evidence.",
        otherwise=(
            "If the tensors trained from the start and are used in each step, look for code that replaces parameters after wrapping (tying, "
            "resizing an embedding, adapters) or a list of parameters that the wrapper was told to ignore."
        ),
    ),
)  # fmt: skip

UNEVEN_CLIPPING = CauseEntry(
    cause="uneven_clipping",
    happened="Gradients agree after the reduction, and some ranks change them before the optimizer gets them while others do not.",
    mechanism=(
        "Clipping or scaling runs after the reduction, on each rank for itself. If it skips tensors on some ranks, uses another limit or "
        "another norm, or hangs on a condition that not all ranks meet, equal gradients become different updates. Loss and norm look normal."
    ),
    would_refute="The gradients differ already as the reduction leaves them.",
    refuting_fact="gradients_differ",
    is_refuted_by=True,
    damage=_REPLICAS_DIFFER,
    rows=(
        Row("replica_divergence", 0.95, "observation", seen=("given_gradients_differ",), absent=("gradients_differ",), unless=("loss_scales_differ", "is_distance_tiny", "is_result_lost_once", "is_added_to")),
        Row("shard_clipping", 0.90, "observation", seen=("is_scaled_on_one_rank",)),
        Row("replica_divergence", 0.60, "inference", seen=("given_gradients_differ",), missing="whether the loss scalers of the ranks agree: gradients that are unscaled by different factors differ in the same way"),
        Row("replica_divergence", 0.40, "inference", seen=("gradients_differ",), absent=("gradients_differ_in_all_tensors",), unless=("is_reduction_seen",), missing=_NO_REDUCED),
    ),
    fix=Fix(
        do=(
            "Look at what runs between `backward` and `optimizer.step` for a condition on the rank, or a list of parameters that is built "
            "differently per rank; make each rank clip the same tensors with the same norm and limit. Then broadcast the named tensors and "
            "their optimizer state from one rank, or resume from a checkpoint older than this step."
        ),
        changes="The named tensors' updates on the named ranks.",
        does_not_fix="The distance that has grown since: without a broadcast the replicas stay apart.",
        expect="The factor between reduced and applied gradient is the same for each tensor on all ranks.",
        verify="Gradients as the optimizer is given them agree at the next comparison.",
        otherwise=(
            "If all ranks clip alike, look for a loss scaler per rank, an optimizer hook on one rank, or a norm that is computed over shards "
            "on some ranks and over whole tensors on others."
        ),
    ),
)  # fmt: skip

CLIP_ON_LOCAL_SHARD = CauseEntry(
    cause="clip_on_local_shard",
    happened="Each rank clips its shard of the gradients by the shard's own norm instead of the global one.",
    mechanism=(
        "A plain clip on sharded gradients takes the norm of what this rank holds. Shards with a large norm are scaled down, others are not: "
        "the update no longer points along the gradient, and the limit means something else with each number of ranks."
    ),
    would_refute="What was clipped is whole on some rank.",
    refuting_fact="is_sharded_everywhere",
    is_refuted_by=False,
    damage=Damage("with the step", "suspect", "each shard was clipped by its own norm, and the weights took it"),
    rows=(
        Row("shard_clipping", 0.93, "observation", seen=("is_limit_exceeded", "is_sharded_everywhere")),
        Row("shard_clipping", 0.50, "inference", unless=("is_scaled_on_one_rank",), missing="whether what was clipped is a shard on every rank"),
    ),
    fix=Fix(
        do="Clip through the wrapper, which adds the shards' norms up: `model.clip_grad_norm_` (FSDP), `accelerator.clip_grad_norm_`, or plain clipping on DTensors.",
        changes="The clip factor: one for all ranks. The global norm is larger than each shard's, so that the same limit clips more.",
        does_not_fix="Steps that were taken; they were distorted, not wrong in size, and the run may go on from here.",
        expect="The clipped norm is the same number on all ranks.",
        verify="The evidence's two norms agree in the next steps.",
        otherwise="If the wrapper's clip is used, the model was clipped a second time somewhere: search for `clip_grad_norm_` in callbacks and trainers.",
    ),
)  # fmt: skip

OPTIMIZER_STATE_MISMATCH = CauseEntry(
    cause="optimizer_state_mismatch",
    happened="Gradients agree, but the ranks' optimizers apply them differently: learning rate, loss scale, step count or moments differ.",
    mechanism=(
        "Each rank has an optimizer of its own, and nothing compares them. An optimizer or a schedule that steps on some ranks only, a state that was loaded "
        "on one rank, a setting that hangs on the rank, or moments that were damaged turn equal gradients into different updates."
    ),
    would_refute="The gradients differ as well, and did so first.",
    refuting_fact="gradients_differ",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "replicas hold different states, and the files hold one rank's"),
    rows=(
        Row("replica_divergence", 0.93, "observation", seen=("hyperparameters_differ",), absent=("gradients_differ",), unless=("given_gradients_differ",)),
        Row("replica_divergence", 0.90, "observation", seen=("optimizer_state_differs",), absent=("gradients_differ",), unless=("given_gradients_differ", "parameters_differ_at_first")),
        Row("replica_divergence", 0.80, "documented", seen=("parameters_parted_within_a_step", "gradients_agreed_there"), absent=("gradients_differ", "parameters_differ_at_first"), unless=("given_gradients_differ", "is_one_side_rounded")),
        Row("replica_divergence", 0.75, "documented", seen=("state_parted_with_weights", "is_one_moment_alone"), absent=("gradients_differ", "parameters_differ_at_first"), unless=("given_gradients_differ", "own_history_broke_on_some")),
        Row("replica_divergence", 0.85, "documented", seen=("loss_scales_differ", "given_gradients_differ"), absent=("gradients_differ",)),
        Row("replica_divergence", 0.80, "documented", seen=("hyperparameters_differ",), unknown=("gradients_differ",)),
        Row("rank_shares", 0.90, "observation", seen=("is_step_apart",)),
        Row("replica_divergence", 0.50, "inference", seen=("hyperparameters_differ",), missing="whether gradients differed before the settings did: then the settings are not the beginning"),
        Row("replica_divergence", 0.45, "inference", seen=("parameters_parted_within_a_step",), absent=("gradients_differ", "parameters_differ_at_first"), missing=_NO_STATE),
        Row("replica_divergence", 0.62, "inference", seen=("state_parted_with_weights", "parameters_differ_in_all_tensors"), absent=("gradients_differ", "parameters_differ_at_first"), unless=("given_gradients_differ", "is_distance_tiny", "own_history_broke_on_some"), missing=_NO_MOMENT),
    ),
    fix=Fix(
        do=(
            "Compare the values in the evidence with what the configuration says; make the named rank build, load and schedule its optimizer "
            "like the others (call `scheduler.step()` on all ranks, load the optimizer's state on all). Resume from a checkpoint older than this step."
        ),
        changes="The named rank's optimizer.",
        does_not_fix="Weights that have parted since: setting the learning rate right leaves the distance as it is.",
        expect="Settings, state and parameters agree at each comparison.",
        verify="`holter report` of the resumed run stays empty past this step.",
        otherwise=(
            "If the code is the same for all ranks, the schedule follows something local: a loss or a metric that was not reduced "
            "(`ReduceLROnPlateau`), a loss scaler per rank, a count of local batches."
        ),
    ),
)  # fmt: skip

CORRUPTED_COLLECTIVE = CauseEntry(
    cause="corrupted_collective",
    happened="A reduction delivered wrong data to a rank, once.",
    mechanism=(
        "The reduced gradients agreed before and after, and differed at one step. The update of that step was different on some rank, and the "
        "weights have differed since. A faulty link, adapter or buffer can do this; so can a buffer that is written while it is sent."
    ),
    would_refute="The gradients differ at later steps as well.",
    refuting_fact="gradients_differ_repeatedly",
    is_refuted_by=True,
    damage=Damage("before the step", "poisoned", "a collective delivered wrong data, which the weights took"),
    rows=(
        Row("replica_divergence", 0.85, "documented", seen=("given_gradients_differ", "is_result_lost_once"), absent=("gradients_differ",), tensors="gradients"),
        Row("replica_divergence", 0.70, "inference", seen=("state_parted_with_weights",), absent=("gradients_differ", "parameters_differ_at_first", "parameters_differ_in_all_tensors"), unless=("given_gradients_differ", "own_history_broke_on_some", "hyperparameters_differ", "optimizer_state_differs", "gradients_agreed_there", "is_one_moment_alone"), tensors="parameters", missing=_NO_MOMENT),
        Row("replica_divergence", 0.90, "observation", seen=("gradients_differ_once", "parameters_differ"), absent=("parameters_differ_at_first",), unless=("own_history_broke_on_some",), tensors="gradients"),
        Row("replica_divergence", 0.80, "documented", seen=("gradients_differ_once",), absent=("parameters_differ_at_first",), tensors="gradients"),
        Row("replica_divergence", 0.50, "inference", seen=("gradients_differ",), absent=("gradients_differ_always", "gradients_differ_ever_since"), tensors="gradients", missing=_NO_SECOND),
        Row("replica_divergence", 0.30, "inference", absent=("parameters_differ_at_first", "gradients_differ"), unless=("own_history_broke_on_some", "hyperparameters_differ", "given_gradients_differ"), tensors="parameters", missing="a comparison of the gradients at the very step at which the weights parted"),
    ),
    fix=Fix(
        do=(
            "Resume from a checkpoint older than this step, with the named rank on another host (if several are named, it is one of them). Read "
            "the link and adapter counters of these hosts (NVLink, InfiniBand symbol errors, retransmits) and the kernel log of that minute."
        ),
        changes="Which machine and which links carry this rank.",
        does_not_fix="The weights since this step: they differ by one wrong update on some rank, perhaps on rank 0, whose weights are saved.",
        expect="Past this step gradients and parameters agree.",
        verify="Repeat the steps from the older checkpoint: this step's gradients agree.",
        otherwise=(
            "If it comes back on other links, something writes to gradients while they are reduced: a second stream, an asynchronous clip, a "
            "communication hook."
        ),
    ),
)  # fmt: skip

BUFFER_DIVERGENCE = CauseEntry(
    cause="buffer_divergence",
    happened="Parameters agree between ranks, buffers do not: running statistics or tables are each rank's own.",
    mechanism=(
        "Gradients are reduced, buffers are not. Where the wrapper does not broadcast them (`broadcast_buffers=False`), each rank updates its "
        "running statistics from its own batches, and evaluation and checkpoints use those of one rank."
    ),
    would_refute="The parameters differ as well: then the buffers follow them.",
    refuting_fact="parameters_differ",
    is_refuted_by=True,
    rows=(
        Row("buffer_divergence", 0.93, "observation", seen=("buffers_differ_repeatedly",), absent=("parameters_differ",), unless=("are_dtypes_different",)),
        Row("buffer_divergence", 0.80, "documented", seen=("buffers_differ_repeatedly",), unless=("parameters_differ",)),
        Row("buffer_divergence", 0.60, "inference", missing="a comparison of the parameters, and a second one of the buffers"),
    ),
    fix=Fix(
        do=(
            "Leave `broadcast_buffers` on, or convert the model with `SyncBatchNorm.convert_sync_batchnorm` before wrapping. To save this run: "
            "average the named buffers over the ranks (`all_reduce`) before evaluating and saving."
        ),
        changes="The named buffers. SyncBatchNorm also changes training itself: batches are normalised over all ranks.",
        does_not_fix="Evaluations so far: they depended on which rank ran them.",
        expect="Buffers agree when the model is called.",
        verify="No difference at the next two comparisons; ranks evaluate the same batch to the same loss.",
        otherwise="If the statistics are meant to be local, tell the wrapper to ignore these buffers, and average them where you save.",
    ),
)  # fmt: skip

MODEL_STRUCTURE_MISMATCH = CauseEntry(
    cause="model_structure_mismatch",
    happened="Ranks built models with different parameters: names, shapes or order differ.",
    mechanism=(
        "A reduction pairs tensors by position. Ranks whose parameters have different names or another order add one tensor's gradient to another's; "
        "with different shapes the reduction fails, or reads past the end."
    ),
    would_refute="All ranks have the same names, shapes and order.",
    refuting_fact="is_structure_different",
    is_refuted_by=False,
    damage=Damage("before the step", "suspect", "ranks hold different models, and the files hold one rank's"),
    rows=(
        Row("structure_mismatch", 0.95, "observation", seen=("is_structure_different",)),
        Row("structure_mismatch", 0.10, "inference", missing="a census of every rank"),
    ),
    fix=Fix(
        do=(
            "Stop the run. Build the model by the same code and configuration on all ranks: no branch on the rank, no iteration over a set, no "
            "configuration read at different times. Restart from the beginning or from a checkpoint of a sound run."
        ),
        changes="The named tensors on the named ranks.",
        does_not_fix="What was trained so far: gradients went into the wrong tensors.",
        expect="All ranks report the same census.",
        verify="`[(n, p.shape) for n, p in model.named_parameters()]` is equal on all ranks before wrapping.",
        otherwise="If the code is the same, compare library versions and the checkpoint's configuration on the named hosts.",
    ),
)  # fmt: skip

DTYPE_MISMATCH_ACROSS_RANKS = CauseEntry(
    cause="dtype_mismatch_across_ranks",
    happened="The same tensor has another dtype on some rank.",
    mechanism=(
        "Ranks were built or loaded with different precision settings: a checkpoint in half precision on one host, a conversion behind a branch on the "
        "rank, another library default. A reduction over different dtypes aborts, or adds bits that mean something else; where it works, the ranks round differently."
    ),
    would_refute="All ranks hold the named tensors in the same dtype.",
    refuting_fact="are_dtypes_different",
    is_refuted_by=False,
    damage=Damage("before the step", "suspect", "ranks hold weights of different precision, and the files hold one rank's"),
    rows=(
        Row("structure_mismatch", 0.95, "observation", seen=("are_dtypes_different",), absent=("is_structure_different", "are_frozen_sets_different")),
        Row("structure_mismatch", 0.60, "inference", seen=("are_dtypes_different",), missing="whether the other difference brought this one about"),
        Row("frozen_divergence", 0.95, "observation", seen=("are_dtypes_different",), absent=("is_implausible",)),
        Row("buffer_divergence", 0.93, "observation", seen=("are_dtypes_different",), absent=("parameters_differ",)),
        Row("buffer_divergence", 0.60, "inference", seen=("are_dtypes_different",), missing="a comparison of the parameters: another dtype of those would explain the buffers"),
    ),
    fix=Fix(
        do=(
            "Stop the run. Give the dtype where the model is built or loaded (`dtype=...`), the same on all ranks, and convert before wrapping. "
            "Restart, or resume from a checkpoint of a sound rank."
        ),
        changes="The named tensors' dtype on the named ranks, and their memory.",
        does_not_fix="Precision that the named ranks have already lost: load their weights anew, do not only widen them.",
        expect="The census shows one dtype for each tensor, and parameters agree.",
        verify="`{n: p.dtype for n, p in model.named_parameters()}` is equal on all ranks.",
        otherwise="If the code is the same, compare environment variables, library versions and device types of the named hosts: some choose a dtype by device.",
    ),
)  # fmt: skip

GRADIENT_SCALE_MISMATCH = CauseEntry(
    cause="gradient_scale_mismatch",
    happened="The gradients of some parameters, or of some rank, are a multiple of what another axis or number of micro-batches implies.",
    mechanism=(
        "Each axis of a mesh sums gradients or averages them, and somebody must divide once by the number of losses. Experts that receive the tokens of all ranks hold the sum of all "
        "losses, while their wrapper divides by the few ranks of its own mesh; a divide factor is set on one module, or for one axis; a gradient that is whole already is summed "
        "again; a division or a sum by hand stands between backward and step; one rank sums its loss or has fewer micro-batches where the others average over more."
    ),
    would_refute="Losses over divisor are the same for all parameters and ranks.",
    refuting_fact="is_scale_one",
    is_refuted_by=True,
    rows=(
        Row("gradient_scale", 0.93, "observation", seen=("is_scale_apart",), absent=("is_scale_one",)),
        Row("applied_scale", 0.90, "observation", seen=("is_scale_apart", "is_from_a_step_on"), absent=("is_scale_one",)),
        Row("rank_shares", 0.90, "observation", seen=("is_count_apart",), absent=("is_scale_one",)),
        Row("rank_shares", 0.80, "documented", seen=("is_loss_apart", "is_factor_steady"), absent=("is_scale_one",)),
        Row("rank_shares", 0.45, "inference", missing="whether the loss of the named rank is reduced and divided as on the others"),
        Row("gradient_scale", 0.40, "inference", missing="by what the gradients of each parameter are divided"),
        Row("applied_scale", 0.40, "inference", missing="the tables of gradients from before and after it"),
    ),
    fix=Fix(
        do=(
            "Divide once, and everywhere by the same number: give the experts' wrapper the whole number of data-parallel ranks (`set_gradient_divide_factor`), or divide their gradients by hand; remove "
            "a second sum; use one reduction of the loss and one number of micro-batches on all ranks."
        ),
        changes="The effective learning rate of the named parameters, by the factor that is named; the total norm, and so how often it is clipped.",
        does_not_fix="What the larger steps have done until now; with Adam that is little, unless it was clipped.",
        expect="The gradient norm of the named parameters is that of a run on one rank with the same global batch.",
        verify="One step on one rank and on all ranks with the same samples: gradients of every parameter agree up to rounding.",
        otherwise="If the scale is meant (a rate of its own for these parameters), say so in the optimizer's groups, where it can be seen.",
    ),
)  # fmt: skip

WRONG_WEIGHTS_LOADED = CauseEntry(
    cause="wrong_weights_loaded",
    happened="A rank trains on weights that are another's part of the model.",
    mechanism=(
        "A shard or a pipeline stage was given the file of another place in the mesh, or a stage took the layers of a whole model by the names that it uses itself, so that every stage has the "
        "first one's. Shapes fit and nothing raises: one part of the trained model is there twice, and another is lost."
    ),
    would_refute="The parts that the ranks began with differ.",
    refuting_fact="are_parts_equal",
    is_refuted_by=False,
    damage=Damage("before the step", "suspect", "a rank trains on another's part of the model"),
    rows=(
        Row("starting_parts", 0.93, "observation", seen=("are_parts_equal", "was_loaded")),
        Row("starting_parts", 0.72, "documented", seen=("are_parts_equal",), absent=("was_loaded",)),
        Row("starting_parts", 0.80, "documented", seen=("is_file_of_another",)),
        Row("starting_parts", 0.10, "inference", missing="the fingerprints of what each rank began with"),
    ),
    fix=Fix(
        do=(
            "Choose the file, or the layers of a whole one, by the rank's own place in the mesh (`stage_index`, `mesh.get_local_rank(axis)`), and hold the names of what was loaded against those "
            "of the whole model. Where nothing was loaded, give each shard a seed of its own."
        ),
        changes="The weights that the named ranks begin with.",
        does_not_fix="What was trained from them until now.",
        expect="No two parts are the same; the first loss is that of the run that saved the checkpoint.",
        verify="The restarted run reports nothing at its first step.",
        otherwise="If the parts are the same on purpose (copies that are trained apart), ignore it: it is said once.",
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(GradientScale(), Stage.MODEL_BUILT, incident_per="run"),
        DetectorEntry(AppliedScale(), Stage.REDUCED, incident_per="run"),
        DetectorEntry(StructureMismatch(), Stage.MODEL_BUILT, incident_per="run"),
        DetectorEntry(StartingParts(), Stage.LOADED),
        DetectorEntry(BufferDivergence(), Stage.WEIGHTS_BEFORE),
        DetectorEntry(ShardClipping(), Stage.REDUCED, tried_on="made-up windows"),
        DetectorEntry(ReplicaDivergence(), Stage.UNKNOWN, incident_per="run"),
        DetectorEntry(ShardHistory(), Stage.WEIGHTS_BEFORE, incident_per="run"),
        DetectorEntry(RankShares(), Stage.BACKWARD),
    ),
    causes=(
        UNSYNCED_INITIALISATION, GRADIENT_SYNC_BYPASSED, UNREDUCED_PARAMETERS, UNEVEN_CLIPPING, CLIP_ON_LOCAL_SHARD,
        OPTIMIZER_STATE_MISMATCH, CORRUPTED_COLLECTIVE, NONDETERMINISTIC_DRIFT, SILENT_DATA_CORRUPTION, BUFFER_DIVERGENCE,
        MODEL_STRUCTURE_MISMATCH, DTYPE_MISMATCH_ACROSS_RANKS, GRADIENT_SCALE_MISMATCH, WRONG_WEIGHTS_LOADED,
    ),
    brings_about=(
        # Weights, inputs or numbers that are wrong on one rank show in its loss.
        *(Consequence(leader, ("rank_shares",), whenever=True) for leader in ("structure_mismatch", "replica_divergence", "buffer_divergence", "shard_history")),
        # If some rank has another model, everything later follows from that; ranks whose calls differ wait until one gives up.
        Consequence("structure_mismatch", ("replica_divergence", "frozen_divergence", "frozen_movement", "buffer_divergence", "compute_dtype", "dtype_drift", "collective_mismatch"), ("weights", "curves"), whenever=True),
        Consequence("structure_mismatch", ("stalled_rank",), unless_follower_is=NOT_BY_A_SCRIPT, whenever=True),
        Consequence("structure_mismatch", ("dead_rank",), unless_follower_has=NOT_BY_A_NUMBER),
        Consequence("replica_divergence", ("buffer_divergence",), ("curves",)),
        # A flipped exponent bit makes a weight huge, and the next forward pass overflows. It cannot spoil a batch.
        Consequence("shard_history", ("nonfinite_values", "loss_trend", "gradient_explosion"), ("curves",), whenever=True),
        Consequence("replica_divergence", ("nonfinite_values",), if_leader_is=("silent_data_corruption", "corrupted_collective"), unless_follower_is=("nonfinite_input",), on_a_shared_rank=True),
        # DDP reports a bucket that was not finished when the next forward pass begins.
        Consequence("replica_divergence", ("dead_rank", "missing_gradients"), if_leader_is=("unreduced_parameters",), unless_follower_has=NOT_BY_A_NUMBER),
        Consequence("shard_clipping", ("replica_divergence",), ("curves",), whenever=True),
        Consequence("buffer_divergence", ("loss_trend", "overfitting")),
    ),
)  # fmt: skip
