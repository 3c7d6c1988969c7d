"""What the model itself shows: its shape, its first weights, what it computes from too few samples."""

from holter.faults.family import Consequence, DetectorEntry, Family, Stage
from holter.faults.model.architecture import Architecture
from holter.faults.model.causes import CAUSES
from holter.faults.model.initialisation import Initialisation
from holter.faults.model.variance_of_nothing import VarianceOfNothing

FAMILY = Family(
    detectors=(
        DetectorEntry(Initialisation(), Stage.INITIALISED),
        DetectorEntry(Architecture(), Stage.INITIALISED),
        DetectorEntry(VarianceOfNothing(), Stage.FORWARD),
    ),
    causes=CAUSES,
    brings_about=(
        Consequence("initialisation", groups=("weights", "curves"), whenever=True),
        Consequence("variance_of_nothing", ("nonfinite_values", "nonfinite_loss"), whenever=True),
    ),
)  # fmt: skip
