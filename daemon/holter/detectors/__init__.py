"""Detectors judge: each looks at a window of what the ranks said and yields what is wrong.

A detector is a frozen dataclass in a file of its own. Its fields are its thresholds, its file's docstring is its page, and it keeps
nothing between two calls, so that a recorded run can be judged again. `ALL` is the one list of them.
"""

from collections.abc import Iterator
from typing import Protocol

from holter.detectors.accumulation_scale import AccumulationScale
from holter.detectors.adapter_norm import AdapterNorm
from holter.detectors.architecture import Architecture
from holter.detectors.average_tracking import AverageTracking
from holter.detectors.batch_lengths import BatchLengths
from holter.detectors.batch_values import BatchValues
from holter.detectors.buffer_divergence import BufferDivergence
from holter.detectors.buffer_values import BufferValues
from holter.detectors.codebook_usage import CodebookUsage
from holter.detectors.collective_mismatch import CollectiveMismatch
from holter.detectors.compute_dtype import ComputeDtype
from holter.detectors.data_coverage import DataCoverage
from holter.detectors.dead_rank import DeadRank
from holter.detectors.declared_frozen import DeclaredFrozen
from holter.detectors.dtype_drift import DtypeDrift
from holter.detectors.duplicate_batches import DuplicateBatches
from holter.detectors.epoch_order import EpochOrder
from holter.detectors.frozen_divergence import FrozenDivergence
from holter.detectors.frozen_movement import FrozenMovement
from holter.detectors.gradient_balance import GradientBalance
from holter.detectors.gradient_explosion import GradientExplosion
from holter.detectors.gradient_range import GradientRange
from holter.detectors.gradient_vanishing import GradientVanishing
from holter.detectors.importance_ratio import ImportanceRatio
from holter.detectors.initialisation import Initialisation
from holter.detectors.kl_term import KlTerm
from holter.detectors.learning_rate import LearningRate
from holter.detectors.loss_terms import LossTerms
from holter.detectors.loss_trend import LossTrend
from holter.detectors.missing_gradients import MissingGradients
from holter.detectors.nonfinite_loss import NonfiniteLoss
from holter.detectors.nonfinite_values import NonfiniteValues
from holter.detectors.optimizer_identity import OptimizerIdentity
from holter.detectors.output_variety import OutputVariety
from holter.detectors.overfitting import Overfitting
from holter.detectors.policy_entropy import PolicyEntropy
from holter.detectors.replica_divergence import ReplicaDivergence
from holter.detectors.reward_spread import RewardSpread
from holter.detectors.reward_trend import RewardTrend
from holter.detectors.shard_clipping import ShardClipping
from holter.detectors.skipped_steps import SkippedSteps
from holter.detectors.slow_rank import SlowRank
from holter.detectors.stale_casts import StaleCasts
from holter.detectors.stalled_rank import StalledRank
from holter.detectors.still_weights import StillWeights
from holter.detectors.structure_mismatch import StructureMismatch
from holter.detectors.uncleared_gradients import UnclearedGradients
from holter.detectors.variance_of_nothing import VarianceOfNothing
from holter.detectors.window import ClassHistory, ExamKey, RankExit, StepView, TableKey, Window
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
