"""What only the script knows, and logs."""

from holter.faults.family import Consequence, DetectorEntry, Family, Stage
from holter.faults.logged.adapter_norm import AdapterNorm
from holter.faults.logged.causes import CAUSES
from holter.faults.logged.codebook_usage import CodebookUsage
from holter.faults.logged.importance_ratio import ImportanceRatio
from holter.faults.logged.kl_term import KlTerm
from holter.faults.logged.output_variety import OutputVariety
from holter.faults.logged.policy_entropy import PolicyEntropy
from holter.faults.logged.reward_spread import RewardSpread
from holter.faults.logged.reward_trend import RewardTrend

FAMILY = Family(
    detectors=(
        DetectorEntry(ImportanceRatio(), Stage.LOGGED, "logged", tried_on="made-up windows"),
        DetectorEntry(RewardSpread(), Stage.LOGGED, "logged"),
        DetectorEntry(KlTerm(), Stage.LOGGED, "logged", tried_on="made-up windows"),
        DetectorEntry(CodebookUsage(), Stage.LOGGED, "logged"),
        DetectorEntry(AdapterNorm(), Stage.LOGGED, "logged", tried_on="made-up windows"),
        DetectorEntry(PolicyEntropy(), Stage.LOGGED, "logged", tried_on="made-up windows"),
        DetectorEntry(OutputVariety(), Stage.LOGGED, "logged", tried_on="made-up windows"),
        DetectorEntry(RewardTrend(), Stage.LOGGED, "logged", tried_on="made-up windows"),
    ),
    causes=CAUSES,
    brings_about=(
        Consequence("reward_spread", ("policy_entropy", "output_variety", "reward_trend"), ("curves",)),
        Consequence("policy_entropy", ("reward_spread", "output_variety", "reward_trend"), ("curves",)),
        Consequence("output_variety", ("reward_trend", "reward_spread")),
        Consequence("kl_term", ("policy_entropy", "output_variety", "reward_trend", "loss_terms"), ("curves",)),
        Consequence("importance_ratio", ("kl_term", "policy_entropy", "reward_trend"), ("curves",)),
    ),
)  # fmt: skip
