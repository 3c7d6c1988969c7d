"""Components that should not move, and do, or were never right."""

from holter.faults.family import CauseEntry, Consequence, Damage, DetectorEntry, Family, Row, Stage
from holter.faults.frozen.declared_frozen import DeclaredFrozen
from holter.faults.frozen.frozen_divergence import FrozenDivergence
from holter.faults.frozen.frozen_movement import FrozenMovement
from holter.records import Fix

_NO_SOURCE = "where each rank's copy was loaded from: without a third replica or a checkpoint with fingerprints both sides look right"
_NO_WRITER = "what wrote to the tensors: no step of an optimizer did"

FROZEN_SET_MISMATCH = CauseEntry(
    cause="frozen_set_mismatch",
    happened="Ranks freeze different parameters of the same model.",
    mechanism=(
        "The wrapper counts what trains and compares shapes, not names. Where rank 0 trains `b` and rank 1 trains `a` of the same shape, the "
        "reduction adds the gradient of one to the other. Nothing raises, and each rank trains a layer that the other holds fixed."
    ),
    would_refute="All ranks train the same names.",
    refuting_fact="are_frozen_sets_different",
    is_refuted_by=False,
    damage=Damage("before the step", "suspect", "ranks train different parameters, and the files hold one rank's"),
    rows=(
        Row("structure_mismatch", 0.95, "observation", seen=("are_frozen_sets_different",), absent=("is_structure_different",)),
        Row("structure_mismatch", 0.60, "inference", seen=("are_frozen_sets_different", "is_structure_different"), missing="a model of the same structure on all ranks, to compare what is frozen in it"),
    ),
    fix=Fix(
        do=(
            "Stop the run. Freeze the same parameters on all ranks, by name, before wrapping, without a branch on the rank, on its data or on "
            "a random choice. Restart from the beginning."
        ),
        changes="Which parameters the named ranks train.",
        does_not_fix="The named tensors: gradients of one layer were applied to another. They must be loaded anew.",
        expect="All ranks report the same trainable names, and parameters agree from step 0.",
        verify="`[n for n, p in model.named_parameters() if p.requires_grad]` is equal on all ranks.",
        otherwise="If the code is the same on all ranks, look for freezing by a match on names that differ (a prefix from a wrapper), or by a random draw.",
    ),
)  # fmt: skip

FROZEN_COMPONENT_UNINITIALISED = CauseEntry(
    cause="frozen_component_uninitialised",
    happened="A frozen component was never given its weights: it holds zeros, NaN or what was in memory.",
    mechanism=(
        "A model that is built without memory (`meta`, `to_empty`, lazy loading) has to be filled afterwards. Some loaders fill rank 0 alone and rely "
        "on the wrapper to broadcast, and what is frozen and outside the wrapper is broadcast by nobody. No gradient ever corrects it."
    ),
    would_refute="The values on all ranks look like weights.",
    refuting_fact="is_implausible",
    is_refuted_by=False,
    damage=Damage("before the step", "poisoned", "a frozen component holds what was never initialised"),
    rows=(
        Row("frozen_divergence", 0.95, "observation", seen=("is_implausible",), unless=("did_agree_before",)),
        Row("frozen_divergence", 0.75, "documented", seen=("is_implausible", "did_agree_before")),
    ),
    fix=Fix(
        do=(
            "Stop the run. Load the named component from its checkpoint on each named rank after `to_empty` (or broadcast it from a sound rank: "
            "`torch.distributed.broadcast` on each parameter and buffer), and restart: what was trained on its output has learned noise."
        ),
        changes="The named tensors on the named ranks.",
        does_not_fix="The trained weights: their gradients came in part from the empty component, on all ranks after the reduction.",
        expect="Frozen fingerprints agree at step 0, and the loss starts lower.",
        verify="The norm of each named tensor is the same on all ranks, and not zero.",
        otherwise=(
            "If the component was loaded, something emptied it later: `to_empty` or `reset_parameters` after loading, a move to another device "
            "through `meta`, a loader that skips names it does not know."
        ),
    ),
)  # fmt: skip

FROZEN_COMPONENT_MISMATCH = CauseEntry(
    cause="frozen_component_mismatch",
    happened="Frozen weights differ between ranks, and all of them look like weights.",
    mechanism=(
        "What is frozen gets no gradient, so that nothing ever makes it equal: a component that was initialised at random on each rank, loaded from "
        "another checkpoint or revision on some host, or changed on one rank stays different for the whole run."
    ),
    would_refute="One side holds what cannot be weights: zeros, NaN, garbage.",
    refuting_fact="is_implausible",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "ranks hold different frozen weights, and the files hold one rank's"),
    rows=(
        Row("frozen_divergence", 0.90, "observation", absent=("is_implausible", "is_one_side_rounded", "did_agree_before"), unless=("are_dtypes_different",)),
        Row("frozen_divergence", 0.60, "inference", absent=("is_implausible",), missing=_NO_SOURCE),
        Row("frozen_divergence", 0.15, "inference", missing=_NO_SOURCE),
    ),
    fix=Fix(
        do=(
            "Compare where each rank loads the named tensors from (path, revision, cache of that host), make it the same, and restart; or broadcast "
            "the component from one rank after loading."
        ),
        changes="The named tensors on the ranks that differ.",
        does_not_fix="What was trained so far on features that differed from rank to rank.",
        expect="Frozen fingerprints agree at step 0.",
        verify="The restarted run reports no difference in frozen parameters.",
        otherwise="If the component is meant to differ between ranks (an ensemble, a stage of a pipeline), it is no replica: nothing needs to be done.",
    ),
)  # fmt: skip

FROZEN_COMPONENT_CHANGED = CauseEntry(
    cause="frozen_component_changed",
    happened="The content of a frozen tensor changed during the run.",
    mechanism=(
        "`requires_grad=False` keeps autograd away, not the optimizer: a parameter that it still holds is moved by a stale gradient, by momentum or by "
        "weight decay. Outside of a step, loading, averaging or an in-place operation can write to it as well."
    ),
    would_refute="No optimizer holds the tensors, and they do not change within a step.",
    refuting_fact="is_moved_in_step",
    is_refuted_by=False,
    damage=Damage("before the step", "suspect", "frozen weights changed"),
    rows=(
        Row("frozen_movement", 0.93, "observation", seen=("is_moved_in_step", "is_held_by_optimizer")),
        Row("frozen_movement", 0.75, "documented", seen=("was_still_before",), absent=("is_moved_in_step",)),
        Row("frozen_movement", 0.75, "documented", seen=("is_scaled",)),
        Row("frozen_movement", 0.50, "inference", missing=_NO_WRITER),
    ),
    fix=Fix(
        do=(
            "Freeze before the optimizer is built and give it only what requires gradients; when freezing later, also set `p.grad = None` and remove the "
            "parameter from its group. Load the named tensors anew from their checkpoint."
        ),
        changes="The named tensors stay as they were loaded.",
        does_not_fix="What was computed from the moved weights: cached features, a KL against a reference, an adapter on top of a base.",
        expect="Frozen fingerprints stay the same from check to check.",
        verify="Compare the named tensors with the checkpoint after a few hundred steps: equal, bit for bit.",
        otherwise="If no optimizer holds them, look for what writes to them: `load_state_dict`, a swap of weights for evaluation, `copy_` into a tied tensor.",
    ),
)  # fmt: skip

UNFROZEN_BY_MISTAKE = CauseEntry(
    cause="unfrozen_by_mistake",
    happened="A component that the settings declare frozen is trained.",
    mechanism=(
        "Its parameters require gradients and an optimizer holds them: it was never frozen, or a later call (not `model.train()`, but "
        "`requires_grad_(True)`, loading an adapter or `prepare_model_for_training`) made it trainable again."
    ),
    would_refute="No optimizer holds the declared parameters.",
    refuting_fact="is_held_by_optimizer",
    is_refuted_by=False,
    damage=Damage("before the step", "suspect", "a component that was to stay as it was is trained"),
    rows=(
        Row("declared_frozen", 0.95, "observation", seen=("is_held_by_optimizer",)),
        Row("declared_frozen", 0.60, "inference", missing="whether an optimizer holds the declared parameters"),
    ),
    fix=Fix(
        do="Freeze the named parameters with `requires_grad_(False)` after all loading and wrapping of adapters and before the optimizer is built; restart from their checkpoint.",
        changes="The named parameters no longer train; memory for their gradients and moments is freed.",
        does_not_fix="The distance that they have drifted so far: load them again.",
        expect="The census shows the named parameters without gradients and in no optimizer.",
        verify="`holter report` of the restarted run stays empty.",
        otherwise="If they are meant to train, correct the declaration.",
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(DeclaredFrozen(), Stage.INITIALISED),
        DetectorEntry(FrozenDivergence(), Stage.LOADED),
        DetectorEntry(FrozenMovement(), Stage.WEIGHTS_AFTER),
    ),
    causes=(
        FROZEN_SET_MISMATCH, FROZEN_COMPONENT_UNINITIALISED, FROZEN_COMPONENT_MISMATCH, FROZEN_COMPONENT_CHANGED,
        UNFROZEN_BY_MISTAKE,
    ),
    brings_about=(
        Consequence("declared_frozen", ("frozen_movement",), ("curves",), whenever=True),
        Consequence("frozen_divergence", ("batch_values", "missing_gradients"), ("curves",), whenever=True),
        Consequence("frozen_divergence", ("compute_dtype",), if_leader_is=("dtype_mismatch_across_ranks",), whenever=True),
        Consequence("frozen_divergence", ("nonfinite_values",), unless_follower_is=("nonfinite_input",), whenever=True),
        # The model is fed what an empty encoder puts out.
        Consequence("frozen_divergence", ("nonfinite_values",), if_leader_is=("frozen_component_uninitialised",), on_a_shared_rank=True, whenever=True),
        Consequence("frozen_movement", ("frozen_divergence", "replica_divergence")),
    ),
)  # fmt: skip
