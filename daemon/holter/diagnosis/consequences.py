"""What can follow from what, as data: read a line as "findings of these detectors may be the leader's doing".

Time decides as well: a cause does not come after its effect. Only what is wrong from the start, whenever it was noticed, explains what
was dated before it (`whenever`).
"""

from dataclasses import dataclass

SCRIPTED = (
    "importance_ratio", "reward_spread", "kl_term", "codebook_usage", "adapter_norm", "loss_terms", "policy_entropy", "output_variety",
    "reward_trend",
)  # fmt: skip
"""What a script says of itself."""

ORDER_IN_STEP = (
    # How the job was set up: true before its first step.
    "structure_mismatch", "optimizer_identity", "declared_frozen", "initialisation", "architecture", "buffer_values", "dtype_drift",
    "compute_dtype", "frozen_divergence",
    # What it is fed.
    "batch_lengths", "data_coverage", "epoch_order", "duplicate_batches", "batch_values",
    # One step, from its beginning to its end.
    "learning_rate", "parameters_before", "buffer_divergence", "stale_casts", "variance_of_nothing", "uncleared_gradients",
    "skipped_steps", "nonfinite_values", "nonfinite_loss", "missing_gradients", "collective_mismatch", "gradients_reduced", "shard_clipping", "gradients",
    "hyperparameters", "accumulation_scale", "gradient_range", "parameters_after", "optimizer_state", "frozen_movement",
    "still_weights", "average_tracking",
    # What a script says of itself, and what a curve shows.
    *SCRIPTED, "gradient_vanishing", "gradient_balance", "gradient_explosion", "overfitting",
    "loss_trend", "slow_rank",
    # A rank that does not go on, or is no more.
    "stalled_rank", "dead_rank",
)  # fmt: skip
"""By the class of tensors that parted first, else by detector."""

CURVES = ("gradient_explosion", "gradient_vanishing", "gradient_balance", "loss_trend", "overfitting", "nonfinite_loss")
"""Symptoms: named as causes only where no better one fits."""
WEIGHTS = ("still_weights", "missing_gradients", "average_tracking")
KILLED = ("is_killed", "is_out_of_memory")
"""Nobody kills a process, and no kernel runs out of memory, over a number."""
HELD = ("rank_suspended", "host_unreachable")
"""Nothing that a script calls, or is fed, stops a process or a host."""


@dataclass(frozen=True)
class Consequence:
    """One line: findings of `after`, at the same moment or later, follow from `leader`."""

    leader: str
    after: tuple[str, ...]
    if_leader_is: tuple[str, ...] = ()
    """Only if the leader's cause is one of these; empty: any."""
    unless_leader_has: tuple[str, ...] = ()
    """Not if one of these facts of the leader is True."""
    unless_follower_is: tuple[str, ...] = ()
    """Not if the follower's cause is one of these."""
    unless_follower_has: tuple[str, ...] = ()
    """Not if one of these facts of the follower is True."""
    on_a_shared_rank: bool = False
    whenever: bool = False
    """Also what is dated before the leader."""


BRINGS_ABOUT: tuple[Consequence, ...] = (
    # Set up wrongly: everything downstream is its doing.
    Consequence("structure_mismatch", ("replica_divergence", "frozen_divergence", "frozen_movement", "buffer_divergence", "compute_dtype", "dtype_drift", *WEIGHTS, *CURVES), whenever=True),
    Consequence("structure_mismatch", ("dead_rank",), unless_follower_has=KILLED),
    Consequence("optimizer_identity", ("uncleared_gradients", "replica_divergence", *WEIGHTS, *CURVES), whenever=True),
    Consequence("declared_frozen", ("frozen_movement", *CURVES), whenever=True),
    Consequence("initialisation", (*WEIGHTS, *CURVES), whenever=True),
    Consequence("buffer_values", ("buffer_divergence", *CURVES), whenever=True),
    Consequence("frozen_divergence", ("batch_values", "missing_gradients", *CURVES), whenever=True),
    Consequence("frozen_divergence", ("compute_dtype",), if_leader_is=("dtype_mismatch_across_ranks",), whenever=True),
    Consequence("frozen_divergence", ("nonfinite_values",), unless_follower_is=("nonfinite_input",), whenever=True),
    # What an empty encoder puts out is what the model is fed.
    Consequence("frozen_divergence", ("nonfinite_values",), if_leader_is=("frozen_component_uninitialised",), on_a_shared_rank=True, whenever=True),
    Consequence("dtype_drift", ("structure_mismatch", "gradient_range", "replica_divergence", "compute_dtype", "buffer_values", *WEIGHTS, *CURVES)),
    Consequence("compute_dtype", ("gradient_range", *CURVES)),
    # Fed wrongly.
    Consequence("batch_lengths", ("dead_rank",), unless_follower_has=KILLED),
    Consequence("data_coverage", ("duplicate_batches", "overfitting", "loss_trend"), whenever=True),
    Consequence("duplicate_batches", ("overfitting", "loss_trend"), whenever=True),
    Consequence("epoch_order", ("overfitting", "loss_trend")),
    Consequence("batch_values", ("nonfinite_values", *CURVES), unless_follower_is=("nonfinite_input",)),
    # A step that is too large, or grows without being meant to.
    Consequence("learning_rate", ("nonfinite_values", "missing_gradients", "still_weights", "skipped_steps", "batch_values", *SCRIPTED, *CURVES), unless_follower_is=("nonfinite_input",)),
    Consequence("learning_rate", ("dead_rank",), unless_follower_has=KILLED),
    Consequence("uncleared_gradients", ("accumulation_scale", "learning_rate", *CURVES), whenever=True),
    Consequence("uncleared_gradients", ("nonfinite_values",), unless_follower_is=("nonfinite_input",)),
    Consequence("accumulation_scale", CURVES),
    Consequence("gradient_explosion", ("loss_trend", "gradient_balance", "nonfinite_loss")),
    Consequence("gradient_explosion", ("nonfinite_values",), unless_follower_is=("nonfinite_input", "nonfinite_forward")),
    Consequence("loss_trend", ("gradient_explosion", "gradient_balance", "overfitting")),
    # No step at all, or one that changes nothing.
    Consequence("skipped_steps", ("nonfinite_values", *WEIGHTS, *CURVES), whenever=True),
    Consequence("missing_gradients", ("still_weights", "gradient_vanishing", "gradient_balance", "loss_trend"), whenever=True),
    Consequence("gradient_range", (*WEIGHTS, *CURVES)),
    Consequence("still_weights", ("loss_trend",)),
    Consequence("stale_casts", (*SCRIPTED, *CURVES), whenever=True),
    Consequence("variance_of_nothing", ("nonfinite_values", "nonfinite_loss"), whenever=True),
    # What a script says of itself.
    Consequence("reward_spread", ("policy_entropy", "output_variety", "reward_trend", *CURVES)),
    Consequence("policy_entropy", ("reward_spread", "output_variety", "reward_trend", *CURVES)),
    Consequence("output_variety", ("reward_trend", "reward_spread")),
    Consequence("kl_term", ("policy_entropy", "output_variety", "reward_trend", "loss_terms", *CURVES)),
    Consequence("importance_ratio", ("kl_term", "policy_entropy", "reward_trend", *CURVES)),
    # NaN in the weights: everything computed from them is NaN, its bit patterns may differ, and a script may stop over it.
    Consequence("nonfinite_values", ("nonfinite_values", "replica_divergence", "buffer_divergence", "batch_values", "gradient_range", "skipped_steps", "learning_rate", *SCRIPTED, *WEIGHTS, *CURVES)),
    Consequence("nonfinite_values", ("dead_rank",), unless_follower_has=KILLED),
    Consequence("nonfinite_loss", ("loss_trend", "overfitting", "loss_terms")),
    # Calls that do not match: what they returned is garbage, on all ranks or on some.
    Consequence("collective_mismatch", ("replica_divergence", "buffer_divergence", *CURVES)),
    Consequence("structure_mismatch", ("collective_mismatch",), whenever=True),
    Consequence("batch_lengths", ("collective_mismatch",)),
    # Replicas that part.
    Consequence("replica_divergence", ("buffer_divergence", *CURVES)),
    # A flipped exponent bit makes a weight huge; the next forward pass overflows. It cannot spoil a batch.
    Consequence("replica_divergence", ("nonfinite_values",), if_leader_is=("silent_data_corruption", "corrupted_collective"), unless_follower_is=("nonfinite_input",), on_a_shared_rank=True),
    # DDP complains of a bucket that was not finished when the next forward pass begins.
    Consequence("replica_divergence", ("dead_rank", "missing_gradients"), if_leader_is=("unreduced_parameters",), unless_follower_has=KILLED),
    Consequence("shard_clipping", ("replica_divergence", *CURVES), whenever=True),
    Consequence("frozen_movement", ("frozen_divergence", "replica_divergence")),
    Consequence("buffer_divergence", ("loss_trend", "overfitting")),
    # Peers of a rank that hangs or dies come late to whatever they do about it; lateness itself breaks nothing.
    Consequence("stalled_rank", ("slow_rank",)),
    Consequence("dead_rank", ("slow_rank",)),
    # Ranks that do not call the same, or run out of data, wait for each other until somebody gives up.
    Consequence("structure_mismatch", ("stalled_rank",), unless_follower_is=HELD, whenever=True),
    Consequence("batch_lengths", ("stalled_rank",), unless_follower_is=HELD),
    Consequence("collective_mismatch", ("stalled_rank",), unless_follower_is=HELD, whenever=True),
    Consequence("collective_mismatch", ("dead_rank",), unless_follower_has=KILLED, whenever=True),
    # Timeouts and people end a job that hangs, whichever of its ranks falls first; memory that ran out is a cause of its own.
    Consequence("stalled_rank", ("dead_rank",), unless_leader_has=("has_died",), unless_follower_has=("is_out_of_memory",), whenever=True),
    # Survivors wait for the dead.
    Consequence("dead_rank", ("stalled_rank",), unless_leader_has=("is_timed_out",), unless_follower_is=HELD, whenever=True),
    # Without one rank nothing that the others do is sound.
    Consequence("dead_rank", ("nonfinite_values", "replica_divergence", "buffer_divergence", "batch_lengths", *WEIGHTS, *CURVES)),
)  # fmt: skip

JUDGES_THE_WHOLE_RUN = frozenset(
    {"replica_divergence", "dead_rank", "structure_mismatch", "optimizer_identity", "missing_gradients"}
)
"""These never speak of a second event: another finding of theirs is a better opinion on the first."""

SPEAKS_OF_EVENTS = frozenset({"nonfinite_values", "stalled_rank"})
"""Findings of these that have one cause but other ranks are other events; of all else one cause is one incident."""
