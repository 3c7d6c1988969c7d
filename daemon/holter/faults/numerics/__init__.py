"""NaN and Inf, and losses, gradients and learning rates that leave their course."""

from holter.faults.family import NOT_BY_A_NUMBER, Consequence, DetectorEntry, Family, Stage
from holter.faults.numerics.causes import CAUSES
from holter.faults.numerics.gradient_balance import GradientBalance
from holter.faults.numerics.gradient_explosion import GradientExplosion
from holter.faults.numerics.gradient_vanishing import GradientVanishing
from holter.faults.numerics.learning_rate import LearningRate
from holter.faults.numerics.loss_terms import LossTerms
from holter.faults.numerics.loss_trend import LossTrend
from holter.faults.numerics.nonfinite_loss import NonfiniteLoss
from holter.faults.numerics.nonfinite_values import NonfiniteValues
from holter.faults.numerics.overfitting import Overfitting

FAMILY = Family(
    detectors=(
        DetectorEntry(LearningRate(), Stage.RATE_SET),
        DetectorEntry(NonfiniteValues(), Stage.BACKWARD, incident_per="event", sees_damage=True),
        DetectorEntry(NonfiniteLoss(), Stage.BACKWARD, "curves"),
        DetectorEntry(LossTerms(), Stage.CURVE, "logged", tried_on="made-up windows"),
        DetectorEntry(GradientVanishing(), Stage.CURVE, "curves", tried_on="made-up windows"),
        DetectorEntry(GradientBalance(), Stage.CURVE, "curves", tried_on="made-up windows"),
        DetectorEntry(GradientExplosion(), Stage.CURVE, "curves"),
        DetectorEntry(Overfitting(), Stage.CURVE, "curves"),
        DetectorEntry(LossTrend(), Stage.CURVE, "curves"),
    ),
    causes=CAUSES,
    brings_about=(
        # NaN in the weights: everything computed from them is NaN, its bit patterns may differ, and a script may stop over it.
        Consequence("nonfinite_values", ("nonfinite_values", "replica_divergence", "buffer_divergence", "batch_values", "gradient_range", "skipped_steps", "learning_rate"), ("logged", "weights", "curves")),
        Consequence("nonfinite_values", ("dead_rank",), unless_follower_has=NOT_BY_A_NUMBER),
        Consequence("nonfinite_loss", ("loss_trend", "overfitting", "loss_terms")),
        # A step that is too large, or grows without being meant to.
        Consequence("learning_rate", ("nonfinite_values", "missing_gradients", "still_weights", "skipped_steps", "batch_values"), ("logged", "curves"), unless_follower_is=("nonfinite_input",)),
        Consequence("learning_rate", ("dead_rank",), unless_follower_has=NOT_BY_A_NUMBER),
        Consequence("gradient_explosion", ("loss_trend", "gradient_balance", "nonfinite_loss")),
        Consequence("gradient_explosion", ("nonfinite_values",), unless_follower_is=("nonfinite_input", "nonfinite_forward")),
        Consequence("loss_trend", ("gradient_explosion", "gradient_balance", "overfitting")),
    ),
)  # fmt: skip
