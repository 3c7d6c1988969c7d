"""Steps that change nothing, or not what they should."""

from holter.faults.family import Consequence, DetectorEntry, Family, Stage
from holter.faults.learning.accumulation_scale import AccumulationScale
from holter.faults.learning.average_tracking import AverageTracking
from holter.faults.learning.causes import CAUSES
from holter.faults.learning.missing_gradients import MissingGradients
from holter.faults.learning.optimizer_identity import OptimizerIdentity
from holter.faults.learning.skipped_steps import SkippedSteps
from holter.faults.learning.still_weights import StillWeights
from holter.faults.learning.uncleared_gradients import UnclearedGradients

FAMILY = Family(
    detectors=(
        DetectorEntry(OptimizerIdentity(), Stage.OPTIMIZER_BUILT, incident_per="run"),
        DetectorEntry(UnclearedGradients(), Stage.CLEARED),
        DetectorEntry(SkippedSteps(), Stage.CLEARED),
        DetectorEntry(MissingGradients(), Stage.BACKWARD, "weights", incident_per="run"),
        DetectorEntry(AccumulationScale(), Stage.GIVEN),
        DetectorEntry(StillWeights(), Stage.WEIGHTS_AFTER, "weights"),
        DetectorEntry(AverageTracking(), Stage.WEIGHTS_AFTER, "weights", tried_on="made-up windows"),
    ),
    causes=CAUSES,
    brings_about=(
        Consequence("optimizer_identity", ("uncleared_gradients", "replica_divergence"), ("weights", "curves"), whenever=True),
        Consequence("uncleared_gradients", ("accumulation_scale", "learning_rate"), ("curves",), whenever=True),
        Consequence("uncleared_gradients", ("nonfinite_values",), unless_follower_is=("nonfinite_input",)),
        Consequence("accumulation_scale", groups=("curves",)),
        # No step at all, or one that changes nothing.
        Consequence("skipped_steps", ("nonfinite_values",), ("weights", "curves"), whenever=True),
        Consequence("missing_gradients", ("still_weights", "gradient_vanishing", "gradient_balance", "loss_trend"), whenever=True),
        Consequence("still_weights", ("loss_trend",)),
    ),
)  # fmt: skip
