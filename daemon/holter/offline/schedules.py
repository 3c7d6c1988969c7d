"""Compares settings with the curve: which rate the schedule gives where it went wrong, and what else the settings begin or end just then.

    milestones: [400], gamma: 10     at step 402 the rate is ten times that of step 399
    unfreeze_at_step: 400            lies two steps before the onset
    max_grad_norm: 0                 clipping is off, and the norm went to 350 times its usual value

What a configuration says is not what ran: everything here is an inference, and says where the log contradicts it. Pure.
"""

import ast
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from holter.offline.code import calls_with_constants
from holter.offline.found import Found, LoggedRun
from holter.offline.points import Curves, Points, finite
from holter.records import Evidence, Finding

RATE = frozenset({"lr", "learning_rate", "base_lr", "max_lr", "peak_lr", "init_lr", "lr0", "lr_max"})
WARM_UP = frozenset({"warmup_steps", "warmup_iters", "lr_warmup_iters", "num_warmup_steps", "warmup_updates", "warmup_num_steps", "warmup", "warmup_epochs", "lr_warmup_steps"})  # fmt: skip
WARM_UP_SHARE = frozenset({"warmup_ratio", "warmup_fraction", "pct_start", "lr_warmup_fraction"})
KIND = frozenset({"lr_scheduler_type", "scheduler", "lr_scheduler", "schedule", "lr_decay_style", "lr_schedule", "lr_policy", "scheduler_type"})  # fmt: skip
MILESTONES = frozenset({"milestones", "lr_steps", "lr_milestones", "decay_milestones"})
PERIOD = frozenset({"step_size", "lr_step_size", "decay_every"})
FACTOR = frozenset({"gamma", "lr_gamma", "factor", "decay_rate", "lr_decay"})
RESTART = frozenset({"t_0", "cycle_steps", "restart_steps", "cycle_length", "lr_restart"})
TOTAL = frozenset({"max_steps", "max_iters", "train_iters", "total_steps", "num_training_steps", "max_updates", "total_iters", "lr_decay_iters", "t_max", "total_num_steps", "max_iter"})  # fmt: skip
EPOCHS = frozenset({"num_train_epochs", "epochs", "num_epochs", "max_epochs", "n_epochs"})
LEAST = frozenset({"min_lr", "eta_min", "lr_min", "end_lr"})
CLIP = frozenset({"max_grad_norm", "grad_clip", "clip_grad", "gradient_clipping", "clip_norm", "gradient_clip_val", "clip_grad_norm", "grad_norm_clip", "clip"})  # fmt: skip
LOGGED_EVERY = frozenset({"logging_steps", "log_interval", "log_every", "log_every_n_steps", "print_freq", "logging_interval"})  # fmt: skip
SCHEDULERS = frozenset({"MultiStepLR", "StepLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "OneCycleLR", "ExponentialLR", "LinearLR", "get_cosine_schedule_with_warmup", "get_linear_schedule_with_warmup", "get_constant_schedule_with_warmup"})  # fmt: skip
_MOMENT = re.compile(r"(?:^|[_.])(?:at|after|start|begin|from|until|end|switch|unfreeze|freeze|step|steps|epoch|epochs|iter|iters|milestone|delay)(?:[_.]|$)")  # fmt: skip
_ROUTINE = re.compile(r"(?:eval|save|log|logging|print|warmup|max|total|num|accumulation|train|per|every|interval|size|seed|checkpoint|display|snapshot|sync|decay)")  # fmt: skip
"""Matches settings that name steps at which nothing begins or ends."""
NEAR = 0.05
"""Share of the run's length by which a moment may lie before an onset and still be connected with it."""
JUMP = 1.5
FP16_MOST = 65_504


@dataclass(frozen=True)
class Setting:
    """A setting's name and value, and the file and line on which it stands; line 0 is unknown."""

    name: str
    value: str
    file: str
    line: int

    def told(self) -> str:
        """Describe the setting for people: `gamma = 10` (config.yaml, line 3)."""
        where = f"{self.file}, line {self.line}" if self.line else self.file
        return f"`{self.name} = {self.value}` ({where})"


@dataclass(frozen=True)
class RateSchedule:
    """The course of the learning rate according to the settings; lengths are in steps, and 0 or empty means that there is none."""

    base: float
    kind: str
    warm_up: float
    total: float
    milestones: tuple[float, ...]
    period: float
    factor: float
    restart: float
    least: float
    said: tuple[Setting, ...]

    def rate(self, step: float) -> float:
        """Return the learning rate at this step."""
        if self.warm_up and step < self.warm_up:
            return self.base * (step + 1) / self.warm_up
        if self.milestones or self.period:
            times = sum(step >= one for one in self.milestones) if self.milestones else step // self.period
            return float(self.base * self.factor**times)
        if self.restart:
            return self._cosine((step - self.warm_up) % self.restart, self.restart)
        span = self.total - self.warm_up
        if "cosine" in self.kind and span > 0:
            return self._cosine(min(step - self.warm_up, span), span)
        if "linear" in self.kind and span > 0:
            return max(self.least, self.base * (1 - min(1.0, (step - self.warm_up) / span)))
        return self.base

    def _cosine(self, at: float, span: float) -> float:
        return self.least + (self.base - self.least) * 0.5 * (1 + math.cos(math.pi * at / span))


def settings_of(found: Found) -> list[Setting]:
    """Return all known settings: first those of configurations, then constants that code gives to schedulers."""
    made = [Setting(name, value, config.file, config.lines.get(name, 0)) for name, value, config in found.settings()]
    for code in found.code:
        for call, line, values in calls_with_constants(code, SCHEDULERS):
            made.append(Setting("scheduler", call, code.file, line))
            made += [Setting(name, value, code.file, line) for name, value in values.items()]
    return made


def schedule_of(settings: Sequence[Setting], last_step: int, per_epoch: float = 0.0) -> RateSchedule | None:
    """Return the schedule, in steps, that the settings give a run that reached `last_step`; None if they name no rate.

    `per_epoch` is the number of steps in an epoch, 0 if unknown.
    """
    rate = _first(settings, RATE)
    if rate is None:
        return None
    said = [rate[0]]

    def number(names: frozenset[str], otherwise: float = 0.0) -> float:
        found = _first(settings, names)
        if found is None:
            return otherwise
        said.append(found[0])
        return found[1]

    kind = next((one for one in settings if _last(one) in KIND and _number(one.value) is None), None)
    epochs = _first(settings, EPOCHS)
    num_epochs = epochs[1] if epochs else last_step / per_epoch if per_epoch else 0.0
    total = number(TOTAL, epochs[1] * per_epoch if epochs else 0.0)
    stones = next((one for one in settings if _last(one) in MILESTONES), None)
    milestones, period = _numbers(stones.value) if stones else (), number(PERIOD)
    if per_epoch > 1 and 0 < max(*milestones, period, 0.0) <= num_epochs:
        # A rate is not changed within so few steps, so they are epochs.
        milestones, period = tuple(one * per_epoch for one in milestones), period * per_epoch
    if stones is not None:
        said.append(stones)
    if kind is not None:
        said.append(kind)
    warm_up = number(WARM_UP) or number(WARM_UP_SHARE) * (total or last_step)
    if any(_last(one) == "warmup_epochs" for one in said):
        warm_up *= per_epoch
    return RateSchedule(
        base=rate[1], kind=kind.value.lower() if kind else "", warm_up=max(0.0, warm_up), total=max(total, 0.0) or last_step, milestones=milestones, period=period,
        factor=number(FACTOR, 0.1), restart=number(RESTART), least=number(LEAST), said=tuple(said),
    )  # fmt: skip


def computed_rates(found: Found, run: LoggedRun, loss: Points) -> Points:
    """Return the rate at every step of the loss, computed from the settings; empty if these give only a constant rate or none."""
    settings = settings_of(found)
    unit = _unit(settings, run.counted_by)
    made = schedule_of(settings, int(loss[-1][0] * unit) if loss else 0, run.steps_per_epoch * unit)
    if made is None or not (made.milestones or made.period or made.restart or made.warm_up or made.kind):
        return []
    return [(step, made.rate(step * unit)) for step, _ in loss]


def against(curves: Curves, finding: Finding, found: Found, run: LoggedRun) -> Iterator[Evidence]:
    """Yield as evidence how the settings are connected with the step at which this curve went wrong."""
    settings = settings_of(found)
    if not settings or finding.first_step < 0 or not curves.loss:
        return
    onset, span = finding.first_step, max(1, curves.loss[-1][0] - curves.loss[0][0])
    unit = _unit(settings, run.counted_by)
    made = schedule_of(settings, int(curves.loss[-1][0] * unit), run.steps_per_epoch * unit)
    if made is not None and finding.facts.get("is_rising"):
        yield from _rate_at(made, curves, onset, span, unit)
        yield from _warm_up(made, onset, span, unit)
    yield from _clipping(settings, curves, onset)
    yield from _precision(settings, finding, curves, onset)
    yield from _moments(settings, onset * unit, span * unit, made)
    if finding.facts.get("is_overfitting"):
        yield from _lengths(settings, onset, curves)


def _rate_at(made: RateSchedule, curves: Curves, onset: int, span: int, unit: float) -> Iterator[Evidence]:
    now = made.rate(onset * unit)
    before = made.rate(max(0.0, (onset - NEAR * span)) * unit)
    at, jump = _jump(made, onset, span, unit)
    if at is not None:
        told = f"the schedule makes the rate {jump:.3g} times as large at step {at:g}" + (
            f", {onset - at:g} before the loss rises" if onset > at else ""
        )
    elif before > 0 and now / before > JUMP:
        told = f"the schedule gives {now:.3g} at step {onset}, {now / before:.3g} times that of {NEAR:.0%} of the run before"
    else:
        top = max((made.rate(step * unit) for step, _ in curves.loss), default=now) or now or 1.0
        of_top = "its highest" if now >= 0.95 * top else f"{now / top:.0%} of its highest"
        is_warm = made.warm_up and abs(onset - made.warm_up / unit) <= 2 * NEAR * span
        told = f"the schedule gives {now:.3g} at step {onset}, {of_top}{'' if is_warm else ': no change of the rate begins it'}"
    known = [] if curves.is_rate_computed else finite(curves.rate)
    place = next((place for place, (step, _) in enumerate(known) if step >= onset), len(known))
    around = [rate for _, rate in known[max(0, place - 1) : place + 2]]
    is_near = any(0.5 < rate / now < 2 for rate in around) if now > 0 else True  # noqa: PLR2004 - another scale, not rounding
    logged = now if is_near else next((rate for _, rate in known[place:]), known[-1][1] if known else now)
    if not is_near and around:
        told += f"; but the log says {logged:.3g}: another schedule ran than the settings say"
    yield _evidence(
        f"{', '.join(one.told() for one in made.said[:6])}: {told}", made.said[0], {"rate": now, "step": onset}
    )


def _jump(made: RateSchedule, onset: int, span: int, unit: float) -> tuple[float | None, float]:
    """Return (step, factor) of the schedule's last jump upward shortly before the onset; (None, 1.0) if there is none."""
    points = [*made.milestones, *(made.restart * k for k in range(1, 200) if made.restart)]
    points += [made.period * k for k in range(1, 200) if made.period]
    for point in sorted(points, reverse=True):
        at = point / unit
        if -0.02 * span <= onset - at <= 2 * NEAR * span + 1:
            before, after = made.rate(point - 1), made.rate(point)
            if before > 0 and after / before >= JUMP:
                return at, after / before
    return None, 1.0


def _warm_up(made: RateSchedule, onset: int, span: int, unit: float) -> Iterator[Evidence]:
    end = made.warm_up / unit
    is_early = onset <= 0.15 * span
    if made.warm_up and abs(onset - end) <= max(2 * NEAR * span, 1):
        when = "ends just then" if onset <= end + 1 else f"had ended {onset - end:g} before"
        yield _evidence(
            f"the warm-up of {made.warm_up:g} {when}, at the full rate of {made.base:.3g}",
            made.said[0],
            {"warm_up": made.warm_up},
        )
    elif is_early and not made.warm_up:
        yield _evidence(f"no warm-up is set: the rate is {made.rate(0):.3g} from the first step on, and the loss rises within the first {max(0.01, onset / span):.0%} of the run", made.said[0], {"warm_up": 0})  # fmt: skip


def _clipping(settings: Sequence[Setting], curves: Curves, onset: int) -> Iterator[Evidence]:
    norms = finite(curves.norm)
    found = next((one for one in settings if _last(one) in CLIP), None)
    if found is None or not norms:
        return
    limit = _number(found.value) or 0.0
    usual = median([value for at, value in norms if at < onset] or [norms[0][1]])
    peak, at = max((value, step) for step, value in norms)
    if limit <= 0 and usual > 0 and peak > 5 * usual:
        yield _evidence(f"{found.told()}: clipping is off, and the gradient norm went to {peak:.3g} at step {at}, {peak / usual:.3g} times its usual {usual:.3g}", found, {"peak": peak, "step": at})  # fmt: skip
    elif limit > 0 and usual > 5 * limit:
        yield _evidence(f"{found.told()}: the norm is usually {usual:.3g}, {usual / limit:.3g} times the limit: nearly every step is cut to the same length", found, {"usual": usual, "limit": limit})  # fmt: skip
    elif 0 < limit < peak and peak > 5 * usual:
        yield _evidence(f"{found.told()}: the norm of {peak:.3g} at step {at} is cut to {limit:g} if this is the norm before clipping", found, {"peak": peak, "limit": limit, "step": at})  # fmt: skip


def _precision(settings: Sequence[Setting], finding: Finding, curves: Curves, onset: int) -> Iterator[Evidence]:
    if not any(finding.facts.get(fact) for fact in ("is_nan", "is_hidden", "is_scale_collapsed", "is_norm_up")):
        return
    found = next((one for one in settings if _is_fp16(one)), None)
    if found is None:
        return
    peak = max((value for step, value in finite(curves.norm) if step <= onset), default=0.0)
    scale = next((value for step, value in finite(curves.scale) if step >= onset), None)
    more = f"; with a loss scale of {scale:g} a gradient above {FP16_MOST / scale:.3g} overflows" if scale else ""
    more += f"; the norm had come to {peak:.3g}" if peak else ""
    yield _evidence(f"{found.told()}: the largest number of fp16 is {FP16_MOST:,}{more}; bf16 has no such limit", found, {"largest": FP16_MOST})  # fmt: skip


def _is_fp16(one: Setting) -> bool:
    value = one.value.lower()
    if _last(one) in {"fp16", "half", "use_fp16"} or one.name.lower().endswith("fp16.enabled"):
        return value in {"true", "1", "yes", "on"}
    return _last(one) in {"precision", "mixed_precision", "dtype", "torch_dtype", "amp_dtype"} and value in {"fp16", "float16", "16", "16-mixed", "half", "torch.float16"}  # fmt: skip


def _moments(settings: Sequence[Setting], onset: float, span: float, made: RateSchedule | None) -> Iterator[Evidence]:
    """Yield what else begins or ends shortly before the onset, according to the settings."""
    known = {(one.file, one.name) for one in made.said} if made else set()
    for one in settings:
        value = _number(one.value)
        name = one.name.lower().rpartition(".")[2]
        if (
            value is None
            or value <= 1
            or (one.file, one.name) in known
            or not _MOMENT.search(name)
            or _ROUTINE.search(name)
        ):
            continue
        if 0 <= onset - value <= max(NEAR * span, 1):
            what = "parts are frozen or unfrozen there" if "freez" in name else "something begins or ends there"
            yield _evidence(f"{one.told()}: {what}, {onset - value:g} before this began", one, {"moment": value})


def _lengths(settings: Sequence[Setting], onset: int, curves: Curves) -> Iterator[Evidence]:
    last = curves.loss[-1][0]
    if onset > 0:
        against_it = [one for one in settings if _last(one) in {"weight_decay", "dropout", "label_smoothing"}]
        off = ", ".join(one.told() for one in against_it if (_number(one.value) or 0.0) == 0)
        first = next(iter(against_it), settings[0])
        yield _evidence(f"trained {last / onset:.3g} times as long as it got better on held-out data" + (f"; nothing works against it: {off}" if off else ""), first, {"best": onset, "last": last})  # fmt: skip


def _unit(settings: Sequence[Setting], counted_by: str) -> float:
    """Return the number of steps per row of a log whose rows are counted, as far as the settings tell; else 1."""
    found = _first(settings, LOGGED_EVERY) if counted_by == "log" else None
    return found[1] if found and found[1] >= 1 else 1.0


def _evidence(summary: str, at: Setting, values: dict[str, float]) -> Evidence:
    return Evidence(kind="setting", summary=summary, values={"file": at.file, "line": at.line, "name": at.name, "value": at.value, "basis": "inference"} | values)  # fmt: skip


def _first(settings: Sequence[Setting], names: frozenset[str]) -> tuple[Setting, float] | None:
    for one in settings:
        value = _number(one.value)
        if _last(one) in names and value is not None:
            return one, value
    return None


def _last(one: Setting) -> str:
    return one.name.lower().replace("-", "_").rpartition(".")[2]


def _number(text: str) -> float | None:
    try:
        value = float(text.strip().strip("[]'\""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _numbers(text: str) -> tuple[float, ...]:
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    values = found if isinstance(found, (list, tuple)) else [found]
    return tuple(sorted(float(one) for one in values if isinstance(one, (int, float)) and not isinstance(one, bool)))
