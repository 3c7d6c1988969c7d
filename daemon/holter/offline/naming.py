"""Finds out what a logged name means, whatever a tool calls it: `Loss/train`, `lm loss`, `trl` and `train_loss` are the loss.

Names are compared by their words, so that an unknown prefix or order is still understood:

    role("train/grad_norm") -> "gradient_norm"     role("val_loss") -> "evaluation"     role("actor/entropy") -> ""
"""

import re
from collections.abc import Collection
from functools import lru_cache
from typing import Literal

Role = Literal["loss", "gradient_norm", "learning_rate", "evaluation", "loss_scale", "memory", "skipped", ""]

_WORDS = re.compile(r"[^a-z0-9]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
HELD_OUT = frozenset({"eval", "evaluation", "val", "valid", "validation", "test", "dev", "heldout"})
_PLAIN = frozenset(
    {"train", "training", "trainer", "step", "epoch", "avg", "average", "mean", "total", "lm", "running", "batch", "iter", "metrics", "global",
     "actor", "optim", "optimizer", "log", "logs", "raw", "smoothed", "smooth", "tr", "scalars", "ce", "nll", "model", "l2", "pre", "clip", "preclip", "current", "curr",
     "cur", "overall", "mini", "minibatch", "reduced", "xent", "root", "info"}
)  # fmt: skip
_LOSS = frozenset({"loss", "trl"})
_NORM_WORDS = frozenset({"grad", "gradient", "gradients", "norm", "gnorm", "gradnorm", "grads"})
_RATE_WORDS = frozenset({"lr", "learning", "rate", "learningrate", "pg", "group", "adam", "adamw", "sgd", "param", "groups", "max", "pg0", "pg1", "group0", "lr0", "lr1", "optim0", "optim1"})  # fmt: skip
_MEMORY = frozenset({"memory", "mem", "vram", "gpumem"})
_STAGES = frozenset({"stage", "phase", "curriculum", "difficulty", "lesson", "task"})
_KNOWN = {"tel": "test_loss", "vl": "val_loss", "gnorm": "grad_norm", "grdn": "grad_norm"}
_STEP = frozenset({"step", "steps", "iter", "iteration", "iterations", "it", "s", "global_step", "globalstep", "num_updates", "train_num_updates",
                   "trainer/global_step", "_step", "current_iteration", "step_num", "optimizer_step", "total_steps_done", "update", "updates", "global_steps",
                   "training/global_step", "n_updates", "time/iterations", "num_steps", "train/global_step", "total_timesteps", "time/total_timesteps", "train/n_updates"})  # fmt: skip
_OF_THE_RUN = frozenset({"num_updates", "train_num_updates", "global_step", "globalstep", "global_steps", "trainer/global_step", "train/global_step", "training/global_step"})  # fmt: skip
_EPOCH = frozenset({"epoch", "epochs", "train/epoch", "ep", "epch"})
REWARDS = frozenset({"reward", "rewards", "return", "returns", "advantage", "advantages", "rew"})
_ADVERSARIAL = re.compile(r"(^|[/_. ])(g|d|gen|disc|generator|discriminator|critic)([/_. ]|\d|$)")
_GRAD_NAME = re.compile(
    r"^(?:train/)?(?:grad(?:ient)?s?[_ ]?(?:l2)?(?:norm)?s?|gnorm)[/:._ ](?P<after>.+)$|^(?P<before>.+?)[/:._ ]+grad(?:ient)?s?(?:[_./ ](?:l2)?norm)?$"
)


def tidy(name: str) -> str:
    """Return a name without quotes and blanks, in lower case: `Lm loss` -> `lm_loss`."""
    name = name.strip().strip("'\"").strip()
    name = re.sub(r"\s+", "_", name).lower()
    return _KNOWN.get(name, name)


@lru_cache(maxsize=8192)
def words(name: str) -> tuple[str, ...]:
    """Return the words of a name, in lower case."""
    return tuple(word for word in _WORDS.split(_CAMEL.sub("_", name).lower()) if word)


def is_step(name: str) -> bool:
    """Whether a number of this name counts steps."""
    return name in _STEP


def is_held_out(name: str) -> bool:
    """Whether a number of this name was measured on data that are not trained on."""
    return any(word in HELD_OUT for word in words(name))


def counts_the_run(name: str) -> bool:
    """Whether a number of this name counts steps from the run's beginning, whatever else its line counts."""
    return name in _OF_THE_RUN


def is_epoch(name: str) -> bool:
    """Whether a number of this name counts epochs."""
    return name in _EPOCH


@lru_cache(maxsize=8192)
def role(name: str) -> Role:  # noqa: PLR0911 - one line a role
    """Return what a series of this name measures, if detectors look at it; empty for anything else, such as a script's own measures."""
    parts = words(name)
    own = [word for word in parts if word not in _PLAIN and not word.isdigit()]
    if not own:
        return ""
    if any(word in HELD_OUT for word in own):
        rest = [word for word in own if word not in HELD_OUT]
        return "evaluation" if rest and set(rest) <= _LOSS else ""
    if set(own) <= _LOSS:
        return "loss"
    if set(own) <= _NORM_WORDS and any("norm" in word for word in own):
        return "gradient_norm"
    if set(own) <= _RATE_WORDS and ({"lr", "lr0", "learningrate"} & set(own) or {"learning", "rate"} <= set(own)):
        return "learning_rate"
    if "scale" in own and ("loss" in own or own == ["scale"] or "grad" in own) and len(own) <= 2:  # noqa: PLR2004 - `loss scale`
        return "loss_scale"
    if own[0] in _MEMORY or (own[-1] in _MEMORY and len(own) <= 3) or {"max", "mem"} <= set(own):  # noqa: PLR2004 - `peak gpu mem`
        return "memory"
    if "skipped" in own and ("iterations" in parts or "steps" in parts or own == ["skipped"]):
        return "skipped"
    return ""


_MEASURES = frozenset({"loss", "acc", "accuracy", "ppl", "perplexity", "kl", "entropy", "f1", "auc", "auroc", "bleu", "wer", "map", "iou", "dice", "error", "err", "trl", "tel"})  # fmt: skip


@lru_cache(maxsize=8192)
def is_measured(name: str) -> bool:
    """Whether a number of this name is measured in training.

    Numbers that a log prints before training (sizes, limits, shares of a download) are no points of a curve.
    """
    return bool(role(name) or set(words(name)) & _MEASURES or is_reward(name) or of_policy(name) or module_of_gradient(name))  # fmt: skip


@lru_cache(maxsize=8192)
def module_of_gradient(name: str) -> str:
    """Return the layer whose gradient norm has this name; empty if it is no layer's gradient norm."""
    if role(name) == "gradient_norm" or "clip" in name or "scale" in name:
        return ""
    found = _GRAD_NAME.match(name)
    if not found:
        return ""
    layer = found.group("after") or found.group("before") or ""
    layer = re.sub(r"[/:._ ](?:l2_?)?norm$", "", layer)
    has_more = (
        set(words(layer))
        - _PLAIN
        - {"max", "min", "std", "var", "overflow", "accum", "accumulation", "steps", "updates", "time"}
    )
    return layer if has_more else ""


@lru_cache(maxsize=8192)
def is_stage(name: str) -> bool:
    """Whether a number of this name counts the stages of a plan: `stage`, `curriculum/level`, `task_id`."""
    parts = set(words(name)) - _PLAIN
    return bool(parts & _STAGES) and parts <= _STAGES | {"id", "idx", "index", "level", "number", "num"}


@lru_cache(maxsize=8192)
def is_reward(name: str) -> bool:
    """Whether a number of this name belongs to reinforcement learning, where the loss does not say how good the policy is."""
    parts = set(words(name))
    # `dice_score` measures a model, `critic/score` rewards a policy.
    is_score = bool(parts & {"score", "scores"} and parts & {"objective", "critic", "rollout", "ppo", "policy", "env", "episode"})  # fmt: skip
    return (
        bool(parts & REWARDS)
        or is_score
        or "pg_loss" in name
        or "policy_loss" in name
        or "policy_gradient_loss" in name
    )


_AROUND = frozenset({"objective", "policy", "actor", "critic", "rollout", "train", "training", "avg", "average", "mean", "ep", "episode", "env", "losses", "metrics", "stats", "ppo"})  # fmt: skip
_MEANT = {"entropy": "entropy", "kl": "kl", "reward": "reward", "rewards": "reward", "score": "reward", "scores": "reward", "rew": "reward", "return": "reward", "returns": "reward"}  # fmt: skip


@lru_cache(maxsize=8192)
def of_policy(name: str) -> str:
    """Return the live detectors' name for a measure of a policy; empty if the name is not of one.

    `policy/entropy_avg` -> `entropy`, `rollout/ep_rew_mean` -> `reward`.
    """
    own = [word for word in words(name) if word not in _AROUND]
    return _MEANT.get(own[0], "") if len(own) == 1 else ""


def is_preference(names: Collection[str]) -> bool:
    """Whether rewards among these names are those of a preference loss (DPO and similar), which is minimised like any other."""
    return any(name.endswith(("rewards/margins", "rewards/chosen")) for name in names)


@lru_cache(maxsize=8192)
def is_adversarial(name: str) -> bool:
    """Whether a loss of this name belongs to one of two models that train against each other."""
    return "loss" in name and bool(_ADVERSARIAL.search(name))


@lru_cache(maxsize=8192)
def term_of_loss(name: str) -> str:
    """Return which term of a summed loss has this name; empty if it is no term.

    `loss_bbox` -> `bbox`, `loss/kl` -> `kl`, `cls_loss` -> `cls`.
    """
    parts = words(name)
    if set(parts) & HELD_OUT:
        return ""
    return _term(name)


@lru_cache(maxsize=8192)
def held_out_term(name: str) -> str:
    """Return which term of the loss on held-out data has this name: `box` for `val/box_loss`; empty if it is no such term."""
    return _term(name) if set(words(name)) & HELD_OUT else ""


def _term(name: str) -> str:
    parts = [word for word in words(name) if word not in HELD_OUT]
    if "loss" not in parts or role(name) or is_adversarial(name):
        return ""
    own = [word for word in parts if word not in _PLAIN and word != "loss"]
    bad = {
        "scale",
        "weight",
        "coef",
        "time",
        "best",
        "min",
        "max",
        "std",
        "ema",
        "delta",
        "ratio",
        "balance",
        "clipfrac",
        "prev",
        "last",
        "final",
    }
    return "_".join(own) if own and not set(own) & bad and len(own) <= 2 else ""  # noqa: PLR2004 - longer names are something else
