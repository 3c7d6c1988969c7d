"""What the ranks are fed."""

from holter.faults.data.batch_lengths import BatchLengths
from holter.faults.data.batch_values import BatchValues
from holter.faults.data.causes import CAUSES
from holter.faults.data.data_coverage import DataCoverage
from holter.faults.data.duplicate_batches import DuplicateBatches
from holter.faults.data.epoch_order import EpochOrder
from holter.faults.family import NOT_BY_A_NUMBER, NOT_BY_A_SCRIPT, Consequence, DetectorEntry, Family, Stage

FAMILY = Family(
    detectors=(
        DetectorEntry(BatchLengths(), Stage.FED),
        DetectorEntry(DataCoverage(), Stage.FED),
        DetectorEntry(EpochOrder(), Stage.FED),
        DetectorEntry(DuplicateBatches(), Stage.FED),
        DetectorEntry(BatchValues(), Stage.FED),
    ),
    causes=CAUSES,
    brings_about=(
        # Ranks that run out of data are waited for until somebody gives up.
        Consequence("batch_lengths", ("collective_mismatch",)),
        Consequence("batch_lengths", ("stalled_rank",), unless_follower_is=NOT_BY_A_SCRIPT),
        Consequence("batch_lengths", ("dead_rank",), unless_follower_has=NOT_BY_A_NUMBER),
        Consequence("data_coverage", ("duplicate_batches", "overfitting", "loss_trend"), whenever=True),
        Consequence("duplicate_batches", ("overfitting", "loss_trend"), whenever=True),
        Consequence("epoch_order", ("overfitting", "loss_trend")),
        Consequence("batch_values", ("nonfinite_values",), ("curves",), unless_follower_is=("nonfinite_input",)),
    ),
)  # fmt: skip
