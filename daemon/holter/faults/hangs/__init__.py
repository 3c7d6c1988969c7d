"""Ranks that do not go on, do not call what their peers call, or are no more."""

from holter.faults.family import NOT_BY_A_NUMBER, NOT_BY_A_SCRIPT, Consequence, DetectorEntry, Family, Stage
from holter.faults.hangs.causes import CAUSES
from holter.faults.hangs.collective_mismatch import CollectiveMismatch
from holter.faults.hangs.dead_rank import DeadRank
from holter.faults.hangs.stalled_rank import StalledRank

FAMILY = Family(
    detectors=(
        DetectorEntry(CollectiveMismatch(), Stage.REDUCTION),
        DetectorEntry(StalledRank(), Stage.STANDSTILL, incident_per="event"),
        DetectorEntry(DeadRank(), Stage.STANDSTILL, incident_per="run", sees_ends=True),
    ),
    causes=CAUSES,
    brings_about=(
        # Calls that do not match: what they returned is garbage, on all ranks or on some; or ranks wait for each other until somebody gives up.
        Consequence("collective_mismatch", ("replica_divergence", "buffer_divergence"), ("curves",)),
        Consequence("collective_mismatch", ("stalled_rank",), unless_follower_is=NOT_BY_A_SCRIPT, whenever=True),
        Consequence("collective_mismatch", ("dead_rank",), unless_follower_has=NOT_BY_A_NUMBER, whenever=True),
        # Timeouts and people end a job that hangs, whichever of its ranks falls first; memory that ran out is a cause of its own.
        Consequence("stalled_rank", ("dead_rank",), unless_leader_has=("has_died",), unless_follower_has=("is_out_of_memory",), whenever=True),
        # Survivors wait for the dead.
        Consequence("dead_rank", ("stalled_rank",), unless_leader_has=("is_timed_out",), unless_follower_is=NOT_BY_A_SCRIPT, whenever=True),
        # Without one rank nothing that the others do is sound.
        Consequence("dead_rank", ("nonfinite_values", "replica_divergence", "buffer_divergence", "batch_lengths"), ("weights", "curves")),
        # Peers of a rank that hangs or dies come late to whatever they do about it; lateness itself breaks nothing.
        Consequence("stalled_rank", ("slow_rank",)),
        Consequence("dead_rank", ("slow_rank",)),
    ),
)  # fmt: skip
