"""What the dtypes did."""

from holter.faults.row import Row

_NO_BITS = "the low mantissa bits of the named weights over several steps"
_NO_CENSUS = "a census from before the change"
_NO_RANGE = "the share of subnormal gradient values: without it small gradients and sparse ones look alike"
_NO_VALUES = "the buffer's values, or its dtype, on every rank"
_NO_OUTPUTS = "the two outputs for one input: a KL of exactly zero can have other reasons"
_NO_INSPECTION = "a pass in which every rank's modules were looked at"

ROWS: tuple[Row, ...] = (
    # still_weights: trained fp32 weights without low bits.
    Row("precision_round_trip", "still_weights", 0.93, "observation", seen=("is_rounded",), absent=("is_narrow",)),
    Row("precision_round_trip", "still_weights", 0.60, "inference", seen=("is_rounded",), missing=_NO_BITS),
    # dtype_drift
    Row("dtype_changed", "dtype_drift", 0.95, "observation", seen=("has_dtype_changed",), absent=("is_before_first_step",)),
    Row("dtype_changed", "dtype_drift", 0.60, "inference", missing=_NO_CENSUS),
    # gradient_range: subnormal values beside the zeros? a scaler?
    Row("gradient_underflow", "gradient_range", 0.93, "observation", seen=("has_subnormals",), absent=("has_normal_gradients",)),
    Row("gradient_underflow", "gradient_range", 0.75, "documented", absent=("has_normal_gradients", "has_loss_scaler")),
    Row("gradient_underflow", "gradient_range", 0.55, "inference", missing=_NO_RANGE),
    # buffer_values: implausible, or narrow?
    Row("lost_buffer", "buffer_values", 0.93, "observation", seen=("is_implausible", "is_on_all_ranks", "is_named_so")),
    Row("lost_buffer", "buffer_values", 0.80, "documented", seen=("is_implausible", "is_on_all_ranks"), absent=("is_in_state_dict",)),
    Row("lost_buffer", "buffer_values", 0.60, "inference", seen=("is_implausible",), missing=_NO_VALUES),
    Row("lost_buffer", "buffer_values", 0.10, "inference", missing=_NO_VALUES),
    Row("buffer_precision_loss", "buffer_values", 0.95, "observation", seen=("is_narrow", "is_progression", "is_named_so"), absent=("is_implausible",)),
    Row("buffer_precision_loss", "buffer_values", 0.85, "documented", seen=("is_narrow",), absent=("is_implausible",)),
    Row("buffer_precision_loss", "buffer_values", 0.55, "inference", absent=("is_implausible",), missing=_NO_VALUES),
    # stale_casts: same input, other weights, same output?
    Row("stale_autocast_cache", "stale_casts", 0.95, "observation", seen=("do_weights_differ", "is_output_equal")),
    Row("stale_autocast_cache", "stale_casts", 0.80, "documented", seen=("do_weights_differ", "is_kl_zero")),
    Row("stale_autocast_cache", "stale_casts", 0.55, "inference", missing=_NO_OUTPUTS),
    # compute_dtype: ranks among each other, or all against their region?
    Row("autocast_not_applied", "compute_dtype", 0.93, "observation", seen=("do_ranks_differ",)),
    Row("autocast_not_applied", "compute_dtype", 0.90, "observation", seen=("is_region_idle",), absent=("do_ranks_differ",)),
    Row("autocast_not_applied", "compute_dtype", 0.55, "inference", missing=_NO_INSPECTION),
)  # fmt: skip
