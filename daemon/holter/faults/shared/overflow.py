"""Judges whether a module that made the first Inf or NaN exceeded the range of its dtype."""

import math

from holter.records import Origin

SUMS = (
    "Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Bilinear", "Conv1D",
)  # fmt: skip
"""Modules that only multiply and add: from finite numbers they can make Inf only by overflow."""
WEIGHTS_ARE_BAD = "its own weights are not finite"
"""The replay's reason if the module's own weights are not finite; `weight_absmax` is then the largest finite one."""


def is_overflown(origin: Origin | None, headroom: float) -> bool | None:
    """Whether magnitudes show that the module's output exceeded its dtype's range; None if nobody measured them.

    log(0) is -Inf too, but the finite numbers beside it are small.
    """
    if origin is None or not origin.module or origin.dtype_max <= 0:
        return None
    weight = origin.weight_absmax
    if not origin.is_input_finite or not math.isfinite(weight) or WEIGHTS_ARE_BAD in origin.reason:
        return False
    is_near = math.isfinite(origin.output_absmax) and origin.output_absmax * headroom >= origin.dtype_max
    is_beyond = origin.input_absmax * weight > origin.dtype_max
    is_sum = origin.module_class in SUMS and weight > 0 and origin.output_infs > 0
    return is_near or is_beyond or is_sum
