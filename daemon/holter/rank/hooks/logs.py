"""Reads what the script says about its run: the numbers that it logs, under known names, and the few kinds of warnings that say what is wrong.

    watch.log(rewards=tensor)         accelerator.log({"train/reward_std": 0.0})
        log.rewards, log.rewards_std,     log.train/reward_std, and again under the name that detectors know: log.rewards_std
        rewards.num_groups ...

A number stays a number and a tensor becomes its mean; `DERIVED` says what else is computed for the few names that mean more. An averaged copy
of the weights (`ema`) is compared with the live ones, on a sample of elements. Nothing waits for a device: a tensor on one is reported when
the device has answered.

A warning is read where Python shows it, after the script's own filters have let it pass: they work exactly as without us. We do not see
what they silence: that would need a filter of ours before theirs, which a script can notice.
"""

import math
import numbers
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch

from holter.rank.context import Context
from holter.rank.readings.batches import corner, sign
from holter.rank.readings.rollout import RolloutReader, bare_name
from holter.records import Logged, ScriptWarning

MAX_NAMES = 256
"""Number of different names in one run that are reported: a script may log a histogram of every tensor."""
MAX_CALLS = 64
"""Number of calls in one step that are reported."""
SAMPLED = 1 << 14
"""A larger tensor is sampled: about this many elements are read, evenly spread if it is contiguous."""
FLAT = 1e-8
"""A group whose spread is below this share of its magnitude counts as having none, because of rounding."""
EVALUATION = ("eval", "val", "valid", "validation", "test", "dev")
ALIASES = {
    "reward": "rewards",
    "reward_mean": "rewards",
    "mean_reward": "rewards",
    "rewards_mean": "rewards",
    "reward_std": "rewards_std",
    "std_reward": "rewards_std",
    "frac_reward_zero_std": "rewards_flat_share",
    "advantage": "advantages",
    "advantage_std": "advantages_std",
    "entropies": "entropy",
    "ratios": "ratio",
    "ratios_std": "ratio_std",
    "importance_ratio_std": "ratio_std",
    "importance_sampling_ratio_std": "ratio_std",
    "prob_ratio": "ratio",
    "importance_ratio": "ratio",
    "importance_weights": "ratio",
    "importance_sampling_ratio": "ratio",
    "kl_div": "kl",
    "kl_divergence": "kl",
    "vocab_size": "vocabulary",
    "code_usage": "codebook_usage",
    "codebook_utilization": "codebook_usage",
    "codebook_utilisation": "codebook_usage",
    "code_perplexity": "codebook_perplexity",
    "vq_perplexity": "codebook_perplexity",
    "num_codes": "codebook_size",
    "train_loss": "loss",
    "training_loss": "loss",
    "val_loss": "eval_loss",
    "valid_loss": "eval_loss",
    "validation_loss": "eval_loss",
    "test_loss": "eval_loss",
}
"""Name that scripts and libraries use (lower case, without what precedes a slash) -> name that detectors know."""
FILLERS = frozenset({"mean", "avg", "average", "train", "training", "policy", "actor", "rollout", "grpo", "rl"})
"""Words that only say where or how a known thing was measured: `actor/entropy_mean` is the entropy."""
POLICY = re.compile(r"(^|[/_.])(actor|policy|ppo|grpo|rl|rollout|importance|prob)([/_.]|$)")
"""Matches names of ratios that are importance ratios, rather than shares of something."""
OF_POLICIES = frozenset({"advantages", "advantages_std", "rewards", "kl"})
"""A script that logs one of these trains a policy, so that a ratio with no other name is an importance ratio."""
RATIOS = frozenset({"ratio", "ratio_std"})
TERM = re.compile(r"^loss_terms?\.|(^|[/_.])(loss|penalty|bonus|term|reg|regularizer|regulariser)$")
"""Matches names of a loss's terms, of which it is reported whether their tensors carry a gradient."""
TERMS_AS_PATH = re.compile(r"^(.*/)?loss_terms?/")
"""Matches the way in which trackers, which take numbers only, are given a term: `train/loss_terms/kl` is the entry `kl` of `loss_terms`."""
MAX_AVERAGED_TENSORS = 16
MAX_AVERAGED_ELEMENTS = 1024
"""Number of elements of each tensor that are compared, at most."""
Numbers = Iterator[tuple[str, float]]
WARNINGS = re.compile(
    r"degrees of freedom is <= 0"  # a variance over one sample, or none
    r"|None of the inputs have requires_grad=True"  # reentrant checkpointing cuts the graph
)
MAX_TEXT = 300
MAX_TOLD = 32
MAX_FRAMES = 64


class LogProbe:
    """Takes what the script logs and reports it at once, with the number of the open step."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._average = AverageReader(context)
        self._rollouts = RolloutReader(context)
        self._names: set[str] = set()
        self._step = -1
        self._num_calls = 0
        self._ratios: set[str] = set()
        self._is_policy = False

    def log(self, values: Mapping[str, Any]) -> None:
        """Report these values; never raise."""
        self._context.guard.wrap(self._log)(values)

    def _log(self, values: Mapping[str, Any]) -> None:
        step = self._context.log.step
        if step != self._step:
            self._step, self._num_calls, self._ratios = step, 0, set()
        self._num_calls += 1
        if self._num_calls > MAX_CALLS:
            return
        told: dict[str, float] = {}
        self._is_policy |= any(meaning_of(str(name).lower()) in OF_POLICIES for name in values)
        # Rewards are read before advantages: both report groups, and those of the rewards, which are the original ones, count.
        if found := named_tensors(values.get("rollout")):
            self._rollouts.read(found)
        for name, value in sorted(values.items(), key=lambda item: meaning_of(str(item[0]).lower()) == "advantages"):
            for key, number in self._numbers(TERMS_AS_PATH.sub("loss_terms.", str(name).lower()), value):
                told[key] = (
                    max(told[key], number) if key in told and key.startswith("ratio.") else told.get(key, number)
                )
        self._say(step, told)

    def _say(self, step: int, told: dict[str, float]) -> None:
        room = MAX_NAMES - len(self._names)
        self._names.update([name for name in told if name not in self._names][: max(room, 0)])
        known = {name: number for name, number in told.items() if name in self._names}
        if known:
            self._context.writer.say(step, Logged(values=known))

    def _numbers(self, name: str, value: Any) -> Numbers:
        meaning = meaning_of(name)
        if meaning == "ema" and (found := named_tensors(value)):
            if hasattr(value, "state_dict"):
                self._context.models.averages.add(value)
            yield from self._average.read(found)
            return
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from self._numbers(f"{name}.{str(key).lower()}", inner)
            return
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            value = torch.from_numpy(value)
        if isinstance(value, numbers.Real):
            yield f"log.{name}", float(value)
            if meaning != name:
                yield f"log.{meaning}", float(value)
            if meaning in RATIOS and (self._is_policy or name in RATIOS or POLICY.search(name)):
                yield from self._of_ratio(meaning, torch.tensor(float(value)))
        elif isinstance(value, torch.Tensor) and _is_readable(value):
            yield from self._of_tensor(name, meaning, value)

    def _of_tensor(self, name: str, meaning: str, value: torch.Tensor) -> Numbers:
        if value.is_floating_point() and (meaning == "kl" or TERM.search(name)):
            yield f"carries_gradient.{name}", float(value.requires_grad)
        value = value.detach()
        if value.device.type != "cpu":
            self._ask_device(name, meaning, value)
            return
        derive = DERIVED.get(meaning) if value.numel() > 1 else None
        if derive is not None:
            yield from derive(meaning, value)
        if meaning == "ratio":
            yield from self._of_ratio(meaning, value)
        if meaning != "codebook_usage" or value.numel() == 1:
            mean = float(sample(value).double().mean())
            yield f"log.{name}", mean
            if meaning != name:
                yield f"log.{meaning}", mean

    def _of_ratio(self, meaning: str, value: torch.Tensor) -> Numbers:
        """Yield how far the ratios are from one, on the first micro-step of a step.

        A standard deviation is taken as the largest distance, which is at least as large.
        """
        if meaning in self._ratios or self._context.log.micro_step > 1:
            return
        self._ratios.add(meaning)
        if meaning == "ratio_std":
            yield "ratio.first_deviation", float(value)
            return
        apart = (sample(value).double() - 1.0).abs()
        yield "ratio.first_deviation", float(apart.max())
        yield "ratio.first_mean_deviation", float(apart.mean())

    def _ask_device(self, name: str, meaning: str, value: torch.Tensor) -> None:
        if not value.is_floating_point():
            return
        step, numel, names = self._step, value.numel(), {f"log.{name}", f"log.{meaning}"}

        def answered(table: Any) -> None:
            is_odd = bool(table.nans[0] + table.pos_infs[0] + table.neg_infs[0])
            mean = math.nan if is_odd else float(table.sum[0]) / numel
            self._say(step, dict.fromkeys(names, mean))

        self._context.read(f"log.{name}", [value], answered)


def meaning_of(name: str) -> str:
    """Return the name that detectors use for this lower-case name; the name itself if they know none."""
    before, _, tail = name.rpartition("/")
    if not before:
        return ALIASES[name] if name in ALIASES else _near(name)
    is_evaluation = before.rpartition("/")[2] in EVALUATION
    if tail == "loss":
        return "eval_loss" if is_evaluation else "loss" if before in ("train", "training") else name
    if before == "loss":
        return "eval_loss" if tail in EVALUATION else "loss" if tail in ("train", "training") else name
    if is_evaluation:
        return name
    meaning = ALIASES.get(tail, tail)
    return meaning if meaning in KNOWN else _near(name)


def _near(name: str) -> str:
    """Return what a name means without its filler words, as in `critic/advantages/mean`, `actor/entropy_mean`, `train_kl`; else the name itself."""
    if name.startswith("loss_term") or any(word in EVALUATION for word in re.split(r"[/_.\-]", name)):
        return name
    parts = name.split("/")
    last = parts[-2] if len(parts) > 1 and parts[-1] in FILLERS else parts[-1]
    bare = "_".join(word for word in re.split(r"[_.\-]", last) if word not in FILLERS)
    meaning = ALIASES.get(bare, bare)
    return meaning if meaning in KNOWN and not meaning.endswith("loss") else name


def _is_readable(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_meta and tensor.numel() > 0


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or of a large one a sample of its elements."""
    if tensor.numel() <= SAMPLED:
        return tensor
    return tensor.view(-1)[:: -(-tensor.numel() // SAMPLED) | 1] if tensor.is_contiguous() else corner(tensor)


def _of_rewards(meaning: str, value: torch.Tensor) -> Numbers:
    """Yield the standard deviation of a tensor [groups, samples], the number of its groups, and how many of them have no spread."""
    groups = value.reshape(value.shape[0], -1) if value.dim() > 1 else value.reshape(1, -1)
    groups = groups[: max(1, SAMPLED * 4 // groups.shape[1])].double()
    yield f"log.{meaning}_std", float(groups.std(correction=0))
    if groups.shape[1] > 1:
        spread = groups.amax(1) - groups.amin(1)
        yield "rewards.num_groups", float(len(groups))
        yield "rewards.num_flat_groups", float((spread <= FLAT * groups.abs().amax(1)).sum())


def _of_advantages(meaning: str, value: torch.Tensor) -> Numbers:
    """Yield the same as for rewards, and the largest magnitude, which is 0 if there is no advantage at all."""
    yield "advantages.largest", float(sample(value).double().abs().max())
    yield from _of_rewards(meaning, value)


def _of_codebook(meaning: str, value: torch.Tensor) -> Numbers:
    """Yield the worst codebook's share of codes in use and its perplexity, from counts [codes] or [codebooks, codes]; and the number of codes."""
    counts = value.reshape(-1, value.shape[-1])[:64].double()
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1e-30)
    perplexity = torch.exp(-torch.special.xlogy(shares, shares).sum(1))
    yield f"log.{meaning}", float((counts > 0).double().mean(1).min())
    yield "log.codebook_perplexity", float(perplexity.min())
    yield "log.codebook_size", float(counts.shape[1])


DERIVED: dict[str, Callable[[str, torch.Tensor], Numbers]] = {
    "rewards": _of_rewards,
    "advantages": _of_advantages,
    "codebook_usage": _of_codebook,
}

KNOWN = frozenset(ALIASES.values()) | frozenset(DERIVED) | {"ratio", "ratio_std", "ema"}

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor of the averaged copy, and the live one."""


def named_tensors(average: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by name of a module or a state dict, or by number of an object with a list `shadow_params`; empty for anything else."""
    if isinstance(average, torch.nn.Module):
        return dict(average.named_parameters())
    if isinstance(average, Mapping):
        return {str(name): value for name, value in average.items() if isinstance(value, torch.Tensor)}
    shadow = getattr(average, "shadow_params", None)
    if isinstance(shadow, Sequence) and all(isinstance(value, torch.Tensor) for value in shadow):
        return {str(number): value for number, value in enumerate(shadow)}
    return {}


class AverageReader:
    """Compares an averaged copy with the live weights, and with what it was when it was last logged."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last = 0
        self._copies: torch.Tensor | None = None

    def read(self, average: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
        """Yield how far the copy is from the live weights, and whether and where it moved since the last call."""
        pairs = self._pairs(average)
        # Tensors are taken evenly over the model: its first ones are embeddings, which move in their own way.
        pairs = [pair for pair in pairs[:: -(-len(pairs) // MAX_AVERAGED_TENSORS) or 1] if _is_comparable(*pair)]
        if not pairs:
            return
        copies = torch.cat([_sample_average(copy.detach()).double() for copy, _ in pairs])
        live = torch.cat([_sample_average(live.detach()).double() for _, live in pairs])
        apart, size = float((copies - live).norm()), float(live.norm())
        yield "ema.distance", apart / size if size else float(apart > 0)
        now = sign([copies])
        if self._last:
            yield "ema.moved", float(now != self._last)
        self._last = now
        yield from self._way(copies, live)

    def _way(self, copies: torch.Tensor, live: torch.Tensor) -> Numbers:
        """Yield, if the copy moved, the share of its elements that changed, and whether toward the live weights (1) or away from them (-1)."""
        before, self._copies = self._copies, copies
        if before is None or before.shape != copies.shape:
            return
        moved, wanted = copies - before, live - before
        size = float(moved.norm() * wanted.norm())
        if size > 0:
            yield "ema.is_narrow", float(_is_narrow(copies) and not _is_narrow(live))
            yield "ema.changed", float((moved != 0).double().mean())
            yield "ema.toward", float(moved @ wanted) / size

    def _pairs(self, average: dict[str, torch.Tensor]) -> list[Pair]:
        for model in self._context.models:
            live = {name.removeprefix(model.prefix): parameter for name, parameter in model.parameters}
            if all(name.isdigit() for name in average):
                trained = [parameter for parameter in live.values() if parameter.requires_grad]
                found = list(zip(average.values(), trained, strict=False)) if len(trained) == len(average) else []
            else:
                found = [
                    (copy, live[bare]) for name, copy in average.items() if (bare := bare_name(name, live)) in live
                ]
            # The averaged copy may itself be one of the watched models.
            if found and found[0][0].data_ptr() != found[0][1].data_ptr():
                return found
        return []


def _is_narrow(values: torch.Tensor) -> bool:
    """Whether bfloat16 or float16 can hold all these values exactly, so that they have probably passed through it."""
    return any(bool((values.to(dtype).double() == values).all()) for dtype in (torch.bfloat16, torch.float16))


def _is_comparable(copy: torch.Tensor, live: torch.Tensor) -> bool:
    is_here = copy.device.type == live.device.type == "cpu" and copy.layout is live.layout is torch.strided
    return is_here and copy.shape == live.shape and copy.is_floating_point() and copy.data_ptr() != live.data_ptr()


def _sample_average(tensor: torch.Tensor) -> torch.Tensor:
    """Return elements that are spread over the whole tensor; if flattening would copy it, the first elements of its first row."""
    if tensor.numel() <= MAX_AVERAGED_ELEMENTS:
        return tensor.reshape(-1)
    if tensor.is_contiguous():
        return tensor.view(-1)[:: -(-tensor.numel() // MAX_AVERAGED_ELEMENTS) | 1]
    return tensor[tuple(0 for _ in range(tensor.dim() - 1))][:MAX_AVERAGED_ELEMENTS]


class WarningProbe:
    """Listens to the warnings that Python shows, and reports known ones with the module that was running."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told: set[tuple[str, str]] = set()

    def install(self) -> None:
        """Replace the function that both `warnings.warn` and torch's native code call."""
        self._context.patches.replace("_showwarnmsg", self._around_show, warnings)

    def _around_show(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        read = self._context.guard.wrap(self._read)

        def show(message: Any) -> None:
            read(message, sys._getframe().f_back)  # noqa: SLF001  the only way to a frame
            original(message)

        return show

    def _read(self, message: Any, frame: FrameType | None) -> None:
        text = str(message.message)
        if WARNINGS.search(text) is None or len(self._told) >= MAX_TOLD:
            return
        where, module = f"{message.filename}:{message.lineno}", self._module(frame)
        if (where, module) not in self._told:
            self._told.add((where, module))
            self._context.writer.say(
                self._context.log.step, ScriptWarning(text=text[:MAX_TEXT], where=where, module=module)
            )

    def _module(self, frame: FrameType | None) -> str:
        """Return the name of the innermost module whose forward is running, its class if it has no known name, "" if there is none.

        The variables of other frames are not read: that would keep their values alive.
        """
        for _ in range(MAX_FRAMES):
            if frame is None:
                return ""
            owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
            if isinstance(owner, torch.nn.Module):
                return self._name(owner)
            frame = frame.f_back
        return ""

    def _name(self, module: torch.nn.Module) -> str:
        for model in self._context.models:
            inner = model.inner
            for name, part in inner.named_modules() if inner is not None else ():
                if part is module:
                    return f"{model.prefix}{name}"
        return type(module).__name__
