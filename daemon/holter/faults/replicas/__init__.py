"""Ranks that should hold the same, and do not."""

from holter.faults.family import NOT_BY_A_NUMBER, NOT_BY_A_SCRIPT, Consequence, DetectorEntry, Family, Stage
from holter.faults.replicas.buffer_divergence import BufferDivergence
from holter.faults.replicas.causes import CAUSES
from holter.faults.replicas.replica_divergence import ReplicaDivergence
from holter.faults.replicas.shard_clipping import ShardClipping
from holter.faults.replicas.structure_mismatch import StructureMismatch

FAMILY = Family(
    detectors=(
        DetectorEntry(StructureMismatch(), Stage.MODEL_BUILT, incident_per="run"),
        DetectorEntry(BufferDivergence(), Stage.WEIGHTS_BEFORE),
        DetectorEntry(ShardClipping(), Stage.REDUCED, tried_on="made-up windows"),
        DetectorEntry(ReplicaDivergence(), Stage.UNKNOWN, incident_per="run"),
    ),
    causes=CAUSES,
    brings_about=(
        # Another model on some rank: everything downstream is its doing, and ranks that do not call the same wait for each other until somebody gives up.
        Consequence("structure_mismatch", ("replica_divergence", "frozen_divergence", "frozen_movement", "buffer_divergence", "compute_dtype", "dtype_drift", "collective_mismatch"), ("weights", "curves"), whenever=True),
        Consequence("structure_mismatch", ("stalled_rank",), unless_follower_is=NOT_BY_A_SCRIPT, whenever=True),
        Consequence("structure_mismatch", ("dead_rank",), unless_follower_has=NOT_BY_A_NUMBER),
        Consequence("replica_divergence", ("buffer_divergence",), ("curves",)),
        # A flipped exponent bit makes a weight huge; the next forward pass overflows. It cannot spoil a batch.
        Consequence("replica_divergence", ("nonfinite_values",), if_leader_is=("silent_data_corruption", "corrupted_collective"), unless_follower_is=("nonfinite_input",), on_a_shared_rank=True),
        # DDP complains of a bucket that was not finished when the next forward pass begins.
        Consequence("replica_divergence", ("dead_rank", "missing_gradients"), if_leader_is=("unreduced_parameters",), unless_follower_has=NOT_BY_A_NUMBER),
        Consequence("shard_clipping", ("replica_divergence",), ("curves",), whenever=True),
        Consequence("buffer_divergence", ("loss_trend", "overfitting")),
    ),
)  # fmt: skip
