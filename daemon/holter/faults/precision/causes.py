"""What the dtypes did."""

from holter.faults.family import CauseEntry, Consequence, Damage, DetectorEntry, Family, Row, Stage
from holter.faults.precision.buffer_values import BufferValues
from holter.faults.precision.compute_dtype import ComputeDtype
from holter.faults.precision.dtype_drift import DtypeDrift
from holter.faults.precision.gradient_range import GradientRange
from holter.faults.precision.stale_casts import StaleCasts
from holter.records import Fix

_NO_BITS = "the low mantissa bits of the named weights over several steps"
_NO_CENSUS = "a census from before the change"
_NO_RANGE = "the share of subnormal gradient values: without it small gradients and sparse ones look alike"
_NO_VALUES = "the buffer's values, or its dtype, on every rank"
_NO_OUTPUTS = "the two outputs for one input: a KL of exactly zero can have other reasons"
_NO_INSPECTION = "a pass in which every rank's modules were looked at"

PRECISION_ROUND_TRIP = CauseEntry(
    cause="precision_round_trip",
    happened="fp32 weights, or what a module gives, are rounded to a narrower dtype and back.",
    mechanism=(
        "The dtype says fp32, the values do not: something writes a bf16 or fp16 copy back into them (an in-place swap, a broadcast or "
        "checkpoint in half precision, `.half().float()`). Small updates are lost just as if the weights were narrow."
    ),
    would_refute="The weights themselves are held in the narrow dtype.",
    refuting_fact="is_narrow",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "values passed through a narrower dtype"),
    rows=(
        Row("replica_divergence", 0.93, "observation", seen=("is_one_side_rounded",), unless=("gradients_differ",), tensors="parameters"),
        Row("replica_divergence", 0.55, "inference", seen=("is_one_side_rounded",), tensors="parameters", missing="why the gradients differ as well: rounded weights alone leave the reduced gradients equal"),
        Row("frozen_divergence", 0.93, "observation", seen=("is_one_side_rounded",), absent=("is_implausible",), unless=("are_dtypes_different",)),
        Row("compute_dtype", 0.90, "observation", seen=("is_one_side_rounded",)),
        Row("compute_dtype", 0.85, "observation", seen=("is_rounded_everywhere",)),
        Row("still_weights", 0.93, "observation", seen=("is_rounded",), absent=("is_narrow",)),
        Row("still_weights", 0.60, "inference", seen=("is_rounded",), missing=_NO_BITS),
    ),
    fix=Fix(
        do=(
            "Look at everything that writes to the named tensors outside of `optimizer.step()`: `copy_`, `load_state_dict`, synchronisation of "
            "weights, quantisation helpers. Keep a master copy in fp32 and cast only what is computed with."
        ),
        changes="Where the cast happens. Memory grows if a second copy is needed.",
        does_not_fix="Bits already lost; training goes on from the rounded values without harm.",
        expect="From the next step on the low mantissa bits of the weights are used.",
        verify="`(p.view(torch.int32) & 0xFFFF).any()` holds for the named tensors after a step.",
        otherwise="If only some ranks show it, compare what they load and receive: the same code runs there on other data.",
    ),
)  # fmt: skip

DTYPE_CHANGED = CauseEntry(
    cause="dtype_changed",
    happened="A tensor's dtype changed during the run.",
    mechanism=(
        "A cast works in place on a module: `.half()`, `.bfloat16()` or `.to(dtype)` for an evaluation, an export or a generation changes the live "
        "model, and nobody changes it back, or only when the bits are already lost."
    ),
    would_refute="The change came before the first step, as a part of the set-up.",
    refuting_fact="is_before_first_step",
    is_refuted_by=True,
    damage=Damage("before the step", "suspect", "a tensor's dtype changed, and its values were rounded"),
    rows=(
        Row("dtype_drift", 0.95, "observation", seen=("has_dtype_changed",), absent=("is_before_first_step",)),
        Row("dtype_drift", 0.60, "inference", missing=_NO_CENSUS),
    ),
    fix=Fix(
        do=(
            "Find the cast that ran just before the step named: evaluation, export, a checkpoint loaded with `assign=True`. Cast a copy "
            "(`copy.deepcopy(model).half()`) or use autocast there. Resume from a checkpoint that is older than this step."
        ),
        changes="The dtype that training goes on with, and the memory of one copy during the evaluation.",
        does_not_fix="Precision that was lost: casting back to fp32 brings no bits back. The optimizer's state may still be in the old dtype.",
        expect="The dtypes at the end of the run are those of its first step.",
        verify="`{p.dtype for p in model.parameters()}` is the same before and after the code that did it.",
        otherwise="If the change was meant, restart the run with the new dtype from a checkpoint, so that optimizer state and gradients have it too.",
    ),
)  # fmt: skip

GRADIENT_UNDERFLOW = CauseEntry(
    cause="gradient_underflow",
    happened="Gradients fall below their dtype's range and become zero.",
    mechanism=(
        "fp16 has no normal number below 6.1e-5 and none at all below 6e-8. Gradients of a mean over many samples lie there, the more so the "
        "nearer a layer is to the input. They are rounded to few bits first, then to zero."
    ),
    would_refute="Beside the zeros there are gradients of normal size: then they are sparse, not small.",
    refuting_fact="has_normal_gradients",
    is_refuted_by=True,
    rows=(
        Row("gradient_range", 0.93, "observation", seen=("has_subnormals",), absent=("has_normal_gradients",)),
        Row("gradient_range", 0.75, "documented", absent=("has_normal_gradients", "has_loss_scaler")),
        Row("gradient_range", 0.55, "inference", missing=_NO_RANGE),
    ),
    fix=Fix(
        do=(
            "Train under bf16, whose range is that of fp32, or scale the loss: `torch.amp.GradScaler`, with fp32 weights and fp16 autocast. Do not "
            "step fp16 weights without a scaler."
        ),
        changes="The dtype of the computation, or a factor on loss and gradients that the scaler takes out again before the step.",
        does_not_fix="Gradients that are small for another reason: a vanishing path, a loss divided twice.",
        expect="The share of zeros and subnormals in the named modules' gradients falls below a tenth.",
        verify="`(p.grad.abs() < 6.1e-5).float().mean()` before unscaling, for the named modules.",
        otherwise="If a scaler is there and its scale is small, something else keeps pushing it down: look for steps that it skips.",
    ),
)  # fmt: skip

BUFFER_PRECISION_LOSS = CauseEntry(
    cause="buffer_precision_loss",
    happened="A buffer that needs range or resolution is held in a narrow dtype.",
    mechanism=(
        "`model.to(torch.bfloat16)` casts buffers along with the weights. Frequencies and positions are multiplied with each other: with 8 "
        "significant bits the positions from 0 to 2047 have 641 different values, and an angle at position 2000 is off by radians. Distant positions look alike."
    ),
    would_refute="The buffer holds no values at all: it was lost in loading.",
    refuting_fact="is_implausible",
    is_refuted_by=True,
    rows=(
        Row("buffer_values", 0.95, "observation", seen=("is_narrow", "is_progression", "is_named_so"), absent=("is_implausible",)),
        Row("buffer_values", 0.85, "documented", seen=("is_narrow",), absent=("is_implausible",)),
        Row("buffer_values", 0.55, "inference", absent=("is_implausible",), missing=_NO_VALUES),
    ),
    fix=Fix(
        do=(
            "Keep the named buffers in fp32: after the cast, assign them anew (`module.inv_freq = compute_inv_freq()`), or compute them in forward under "
            "`torch.autocast(..., enabled=False)` in fp32 and cast only sine and cosine. Loading with `torch_dtype=` keeps them where the library knows better than `.to`."
        ),
        changes="A few kilobytes in fp32, and the model's answers at long distances.",
        does_not_fix="Weights that have been trained with the coarse table: they have adapted to it. Go on training for a while, or begin again.",
        expect="Loss at long contexts falls; at short ones little changes.",
        verify="`model.get_buffer(name).dtype` is float32 for the buffers named, after every cast and wrap.",
        otherwise="If the table is exact in the narrow dtype (powers of two), nothing is lost: keep it out of the check by another name.",
    ),
)  # fmt: skip

LOST_BUFFER = CauseEntry(
    cause="lost_buffer",
    happened="A buffer that must vary is empty, constant or garbage on every rank.",
    mechanism=(
        "A buffer that is not persistent is in no state dict. A model that is built on the meta device and filled with `to_empty` and a checkpoint "
        "gets its weights back, and this buffer stays as the memory was: zeros, or whatever lay there. All ranks agree, so no comparison shows it."
    ),
    would_refute="The ranks differ in it: then one of them was set up in another way.",
    refuting_fact="is_on_all_ranks",
    is_refuted_by=False,
    damage=Damage("before the step", "suspect", "a buffer holds nothing, and the weights were trained with it"),
    rows=(
        Row("buffer_values", 0.93, "observation", seen=("is_implausible", "is_on_all_ranks", "is_named_so")),
        Row("buffer_values", 0.80, "documented", seen=("is_implausible", "is_on_all_ranks"), absent=("is_in_state_dict",)),
        Row("buffer_values", 0.60, "inference", seen=("is_implausible",), missing=_NO_VALUES),
        Row("buffer_values", 0.10, "inference", missing=_NO_VALUES),
    ),
    fix=Fix(
        do=(
            "Compute the named buffers anew after `to_empty` and loading (`module.reset_parameters()`, `post_init`, or the line of the constructor that "
            "makes them), on the right device, on every rank. Then start again: the model was trained without them."
        ),
        changes="The values of the named buffers only.",
        does_not_fix="What was trained with the lost table; a frozen component needs no more than the repair.",
        expect="The first loss after loading is the one that the checkpoint had.",
        verify="The named buffers have more than one value: `model.get_buffer(name).unique().numel() > 1`.",
        otherwise="If the buffer is meant to begin constant and is filled later, nothing is wrong; compare it with a model that was built without `to_empty`.",
    ),
)  # fmt: skip

STALE_AUTOCAST_CACHE = CauseEntry(
    cause="stale_autocast_cache",
    happened="Weights were swapped inside one autocast region, and the cached casts of the old ones were used.",
    mechanism=(
        "Autocast casts each weight that requires a gradient once a region and keeps the copy, by the identity of the tensor. A swap in place changes "
        "the tensor's content and not its identity, so the second call computes with the first one's weights. Reference and policy then "
        "give the same output, and their KL is exactly 0."
    ),
    would_refute="The two calls gave different outputs for the same input.",
    refuting_fact="is_output_equal",
    is_refuted_by=False,
    rows=(
        Row("stale_casts", 0.95, "observation", seen=("do_weights_differ", "is_output_equal")),
        Row("stale_casts", 0.80, "documented", seen=("do_weights_differ", "is_kl_zero")),
        Row("stale_casts", 0.55, "inference", missing=_NO_OUTPUTS),
    ),
    fix=Fix(
        do=(
            "Stop the run: it was not held to its reference. Leave the autocast region before swapping and open a new one for the second call, or call "
            "`torch.clear_autocast_cache()` after each swap, or open the region with `cache_enabled=False`."
        ),
        changes="The KL term begins to act; each weight is cast once more a step.",
        does_not_fix="How far the policy has drifted already: go back to a checkpoint from before the drift, and look at the KL coefficient again.",
        expect="KL is 0 at the first step only, and grows slowly from then on.",
        verify="Call both in one script with weights that differ: the outputs must differ.",
        otherwise="If the second model is a module of its own, its weights have their own casts: then look for a swap that copies nothing.",
    ),
)  # fmt: skip

AUTOCAST_NOT_APPLIED = CauseEntry(
    cause="autocast_not_applied",
    happened="Modules compute in another precision than their peers on other ranks, or than their autocast region says.",
    mechanism=(
        "The region was opened for another device type, is disabled inside the model, or is opened on some ranks only (another configuration, another "
        "library version); or weights and inputs have a dtype that autocast does not cast, such as float64."
    ),
    would_refute="All ranks gave the same dtypes, and the region's own among them.",
    refuting_fact="do_all_agree",
    is_refuted_by=True,
    rows=(
        Row("compute_dtype", 0.93, "observation", seen=("do_ranks_differ",), unless=("is_one_side_rounded",)),
        Row("compute_dtype", 0.70, "documented", seen=("do_ranks_differ", "is_one_side_rounded")),
        Row("compute_dtype", 0.90, "observation", seen=("is_region_idle",), absent=("do_ranks_differ",)),
        Row("compute_dtype", 0.55, "inference", missing=_NO_INSPECTION),
    ),
    fix=Fix(
        do=(
            "Print `torch.is_autocast_enabled(device_type)` and the dtype of the named module's output on each rank. Open the region for the device that the "
            "model is on, around its call, with the same settings on every rank."
        ),
        changes="Precision, speed and memory of the forward pass on the ranks that were different.",
        does_not_fix="Steps taken with mixed ranks: their gradients were averages of two precisions. That is noise, not damage.",
        expect="The named modules give the same dtype on all ranks, and a step takes as long on each.",
        verify="The dtype of the named modules' outputs, on every rank, by a forward hook.",
        otherwise="If the modules are kept wide on purpose, do it on all ranks alike.",
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(BufferValues(), Stage.CONVERTED),
        DetectorEntry(DtypeDrift(), Stage.CONVERTED),
        DetectorEntry(ComputeDtype(), Stage.CONVERTED),
        DetectorEntry(StaleCasts(), Stage.CAST),
        DetectorEntry(GradientRange(), Stage.GIVEN),
    ),
    causes=(
        PRECISION_ROUND_TRIP, DTYPE_CHANGED, GRADIENT_UNDERFLOW, BUFFER_PRECISION_LOSS, LOST_BUFFER, STALE_AUTOCAST_CACHE,
        AUTOCAST_NOT_APPLIED,
    ),
    brings_about=(
        Consequence("buffer_values", ("buffer_divergence",), ("curves",), whenever=True),
        Consequence("dtype_drift", ("structure_mismatch", "gradient_range", "replica_divergence", "compute_dtype", "buffer_values"), ("weights", "curves")),
        Consequence("compute_dtype", ("gradient_range",), ("curves",)),
        Consequence("gradient_range", groups=("weights", "curves")),
        Consequence("stale_casts", groups=("logged", "curves"), whenever=True),
    ),
)  # fmt: skip
