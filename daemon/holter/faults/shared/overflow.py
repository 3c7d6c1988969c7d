"""Whether a module that made the first Inf or NaN passed the range of its dtype."""

import math

from holter.records import Origin

SUMS = (
    "Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Bilinear", "Conv1D",
)  # fmt: skip
"""Modules that only multiply and add: out of finite numbers they can make Inf by overflow alone."""
WEIGHTS_ARE_BAD = "its own weights are not finite"
"""How the replay says so: the largest weight is that of the finite ones."""


def is_overflown(origin: Origin | None, headroom: float) -> bool | None:
    """Whether magnitudes tell that the module's output passed its dtype's range; None: nobody measured them.

    log(0) is -Inf as well, but what is finite beside it is small.
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
