"""What only the script knows."""

from holter.faults.row import Row

_NO_GROUPS = "rewards by group (`watch.log(rewards=...)`): only a summary of them was logged"
_NO_VOCABULARY = "the size of the vocabulary (`watch.log(vocabulary=...)`)"
_NO_TERM = "the KL term as it enters the loss (`watch.log(loss_terms={'kl': ...})`): a script without one may log a zero in its place"
_NO_SIZE = "the size of the codebook (`watch.log(codebook_size=...)`)"

ROWS: tuple[Row, ...] = (
    # reward_spread: is there anything to tell samples apart?
    Row("zero_advantages", "reward_spread", 0.95, "observation", seen=("has_no_spread", "is_counted"), absent=("has_spread",)),
    Row("zero_advantages", "reward_spread", 0.90, "observation", seen=("has_no_spread",), absent=("has_spread",)),
    Row("zero_advantages", "reward_spread", 0.50, "inference", missing=_NO_GROUPS),
    # codebook_usage: how many codes are left?
    Row("codebook_collapse", "codebook_usage", 0.95, "observation", seen=("has_low_usage", "is_size_known"), absent=("is_recovering",)),
    Row("codebook_collapse", "codebook_usage", 0.88, "observation", seen=("has_low_usage",), absent=("is_recovering",)),
    Row("codebook_collapse", "codebook_usage", 0.60, "inference", missing=_NO_SIZE),
    # policy_entropy: at which end of the scale?
    Row("entropy_collapse", "policy_entropy", 0.93, "observation", seen=("is_collapsed", "is_vocabulary_known"), absent=("is_returning",)),
    Row("entropy_collapse", "policy_entropy", 0.80, "documented", seen=("is_collapsed",), absent=("is_returning",)),
    Row("entropy_explosion", "policy_entropy", 0.93, "observation", seen=("is_exploded", "is_vocabulary_known"), absent=("is_returning",)),
    Row("entropy_collapse", "policy_entropy", 0.40, "inference", missing=_NO_VOCABULARY),
    # kl_term: zero, or of the wrong sign?
    Row("kl_sign_flipped", "kl_term", 0.90, "observation", seen=("is_flipped", "has_term"), absent=("is_active",)),
    Row("kl_inactive", "kl_term", 0.85, "documented", seen=("is_zero", "has_term"), absent=("is_active",)),
    Row("kl_inactive", "kl_term", 0.60, "inference", seen=("is_zero",), missing=_NO_TERM),
    Row("kl_inactive", "kl_term", 0.30, "inference", missing=_NO_TERM),
    # reward_trend, importance_ratio, adapter_norm, output_variety: what was logged says it.
    Row("reward_collapse", "reward_trend", 0.80, "documented", seen=("has_fallen",), absent=("is_recovering",)),
    Row("reward_collapse", "reward_trend", 0.50, "inference", missing="more logs of the reward, to tell a dip from a fall"),
    Row("train_inference_mismatch", "importance_ratio", 0.90, "observation", seen=("is_off_at_first",), absent=("is_ever_one",)),
    Row("train_inference_mismatch", "importance_ratio", 0.50, "inference", missing="importance ratios of the first micro-step of the run"),
    Row("clamped_adapter_norm", "adapter_norm", 0.93, "observation", seen=("is_at_limit",), absent=("is_below_limit",)),
    Row("clamped_adapter_norm", "adapter_norm", 0.50, "inference", missing="the limit that clamps the norm"),
    Row("degenerate_outputs", "output_variety", 0.90, "observation", seen=("is_repeating",), absent=("is_varied",)),
    Row("degenerate_outputs", "output_variety", 0.50, "inference", missing="the share of the commonest token over more logs"),
)  # fmt: skip
