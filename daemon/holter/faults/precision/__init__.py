"""Dtypes that are not what they should be, and values that do not fit into them."""

from holter.faults.family import Consequence, DetectorEntry, Family, Stage
from holter.faults.precision.buffer_values import BufferValues
from holter.faults.precision.causes import CAUSES
from holter.faults.precision.compute_dtype import ComputeDtype
from holter.faults.precision.dtype_drift import DtypeDrift
from holter.faults.precision.gradient_range import GradientRange
from holter.faults.precision.stale_casts import StaleCasts

FAMILY = Family(
    detectors=(
        DetectorEntry(BufferValues(), Stage.CONVERTED),
        DetectorEntry(DtypeDrift(), Stage.CONVERTED),
        DetectorEntry(ComputeDtype(), Stage.CONVERTED),
        DetectorEntry(StaleCasts(), Stage.CAST),
        DetectorEntry(GradientRange(), Stage.GIVEN),
    ),
    causes=CAUSES,
    brings_about=(
        Consequence("buffer_values", ("buffer_divergence",), ("curves",), whenever=True),
        Consequence("dtype_drift", ("structure_mismatch", "gradient_range", "replica_divergence", "compute_dtype", "buffer_values"), ("weights", "curves")),
        Consequence("compute_dtype", ("gradient_range",), ("curves",)),
        Consequence("gradient_range", groups=("weights", "curves")),
        Consequence("stale_casts", groups=("logged", "curves"), whenever=True),
    ),
)  # fmt: skip
