"""Detectors judge: each looks at a window of what the ranks said and yields what is wrong.

A detector is a frozen dataclass in a file of its own. Its fields are its thresholds, its file's docstring is its page, and it keeps
nothing between two calls, so that a recorded run can be judged again. `ALL` is the one list of them.
"""

from collections.abc import Iterator
from typing import Protocol

from holter.faults.data.batch_lengths import BatchLengths
from holter.faults.data.batch_values import BatchValues
from holter.faults.data.data_coverage import DataCoverage
from holter.faults.data.duplicate_batches import DuplicateBatches
from holter.faults.data.epoch_order import EpochOrder
from holter.faults.frozen.declared_frozen import DeclaredFrozen
from holter.faults.frozen.frozen_divergence import FrozenDivergence
from holter.faults.frozen.frozen_movement import FrozenMovement
from holter.faults.hangs.collective_mismatch import CollectiveMismatch
from holter.faults.hangs.dead_rank import DeadRank
from holter.faults.hangs.stalled_rank import StalledRank
from holter.faults.learning.accumulation_scale import AccumulationScale
from holter.faults.learning.average_tracking import AverageTracking
from holter.faults.learning.missing_gradients import MissingGradients
from holter.faults.learning.optimizer_identity import OptimizerIdentity
from holter.faults.learning.skipped_steps import SkippedSteps
from holter.faults.learning.still_weights import StillWeights
from holter.faults.learning.uncleared_gradients import UnclearedGradients
from holter.faults.logged.adapter_norm import AdapterNorm
from holter.faults.logged.codebook_usage import CodebookUsage
from holter.faults.logged.importance_ratio import ImportanceRatio
from holter.faults.logged.kl_term import KlTerm
from holter.faults.logged.output_variety import OutputVariety
from holter.faults.logged.policy_entropy import PolicyEntropy
from holter.faults.logged.reward_spread import RewardSpread
from holter.faults.logged.reward_trend import RewardTrend
from holter.faults.model.architecture import Architecture
from holter.faults.model.initialisation import Initialisation
from holter.faults.model.variance_of_nothing import VarianceOfNothing
from holter.faults.numerics.gradient_balance import GradientBalance
from holter.faults.numerics.gradient_explosion import GradientExplosion
from holter.faults.numerics.gradient_vanishing import GradientVanishing
from holter.faults.numerics.learning_rate import LearningRate
from holter.faults.numerics.loss_terms import LossTerms
from holter.faults.numerics.loss_trend import LossTrend
from holter.faults.numerics.nonfinite_loss import NonfiniteLoss
from holter.faults.numerics.nonfinite_values import NonfiniteValues
from holter.faults.numerics.overfitting import Overfitting
from holter.faults.precision.buffer_values import BufferValues
from holter.faults.precision.compute_dtype import ComputeDtype
from holter.faults.precision.dtype_drift import DtypeDrift
from holter.faults.precision.gradient_range import GradientRange
from holter.faults.precision.stale_casts import StaleCasts
from holter.faults.replicas.buffer_divergence import BufferDivergence
from holter.faults.replicas.replica_divergence import ReplicaDivergence
from holter.faults.replicas.shard_clipping import ShardClipping
from holter.faults.replicas.structure_mismatch import StructureMismatch
from holter.faults.slowness.slow_rank import SlowRank
from holter.faults.window import ClassHistory, ExamKey, RankExit, StepView, TableKey, Window
from holter.records import Finding


class Detector(Protocol):
    """What every detector is."""

    @property
    def name(self) -> str:
        """The fault it sees: also its file, its metric label, its alert and its page."""

    def judge(self, window: Window) -> Iterator[Finding]:
        """What is wrong in this window. Pure: the same window gives the same findings."""


ALL: tuple[Detector, ...] = (
    NonfiniteValues(),
    ReplicaDivergence(),
    CollectiveMismatch(),
    DeadRank(),
    StalledRank(),
    DuplicateBatches(),
    DataCoverage(),
    EpochOrder(),
    BatchLengths(),
    BatchValues(),
    RewardSpread(),
    CodebookUsage(),
    Architecture(),
    Initialisation(),
    VarianceOfNothing(),
    OptimizerIdentity(),
    MissingGradients(),
    UnclearedGradients(),
    StillWeights(),
    SkippedSteps(),
    AccumulationScale(),
    AverageTracking(),
    DtypeDrift(),
    GradientRange(),
    BufferValues(),
    StaleCasts(),
    ComputeDtype(),
    BufferDivergence(),
    DeclaredFrozen(),
    FrozenDivergence(),
    FrozenMovement(),
    ShardClipping(),
    StructureMismatch(),
    NonfiniteLoss(),
    LearningRate(),
    GradientExplosion(),
    LossTrend(),
    GradientVanishing(),
    GradientBalance(),
    Overfitting(),
    LossTerms(),
    PolicyEntropy(),
    KlTerm(),
    RewardTrend(),
    ImportanceRatio(),
    AdapterNorm(),
    OutputVariety(),
    SlowRank(),
)

__all__ = [
    "ALL",
    "AccumulationScale",
    "AdapterNorm",
    "Architecture",
    "AverageTracking",
    "BatchLengths",
    "BatchValues",
    "BufferDivergence",
    "BufferValues",
    "ClassHistory",
    "CodebookUsage",
    "CollectiveMismatch",
    "ComputeDtype",
    "DataCoverage",
    "DeadRank",
    "DeclaredFrozen",
    "Detector",
    "DtypeDrift",
    "DuplicateBatches",
    "EpochOrder",
    "ExamKey",
    "FrozenDivergence",
    "FrozenMovement",
    "GradientBalance",
    "GradientExplosion",
    "GradientRange",
    "GradientVanishing",
    "ImportanceRatio",
    "Initialisation",
    "KlTerm",
    "LearningRate",
    "LossTerms",
    "LossTrend",
    "MissingGradients",
    "NonfiniteLoss",
    "NonfiniteValues",
    "OptimizerIdentity",
    "OutputVariety",
    "Overfitting",
    "PolicyEntropy",
    "RankExit",
    "ReplicaDivergence",
    "RewardSpread",
    "RewardTrend",
    "ShardClipping",
    "SkippedSteps",
    "SlowRank",
    "StaleCasts",
    "StalledRank",
    "StepView",
    "StillWeights",
    "StructureMismatch",
    "TableKey",
    "UnclearedGradients",
    "VarianceOfNothing",
    "Window",
]
