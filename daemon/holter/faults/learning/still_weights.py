"""Still weights: the optimizer steps, and the weights do not change, or not as they should.

What it detects
    Trained tensors of which no bit changes although gradient and learning rate are not zero; tensors with a gradient whose learning
    rate stays at exactly zero, all of them (a schedule) or those of one group; tensors with a gradient that no optimizer steps: one
    that holds them is never called, or they are few among many that are held; weights in bf16 or fp16 of which a step changes few
    elements, because the update is under half a unit in the last place, or in any dtype from the first steps on, because the rate is
    that small; and trained fp32 weights whose low mantissa bits are zero at every step, because something rounds them to a narrower
    dtype and back.

Why it matters
    Nothing fails. The loss falls a little, from the few elements that do move, and levels off: weeks of training for a fraction of
    what the same steps give with fp32 weights.

False positives
    Updates that are too small even for fp32 (the beginning of a warm-up, SGD with a tiny learning rate) are not lost updates: a tensor is
    named only if learning rate times gradient is several times its own rounding. Few changed elements count only when the learning rate
    is not rising, at a tenth or more of its peak, and not under stochastic rounding, whose rare changes are large enough to make up for
    the others. Narrow weights beside master copies in fp32 are not held by the optimizer, and do not count. A warm-up that begins at zero
    leaves it within a few steps, and a schedule that touches zero rises again: a rate counts as zero after sixteen steps, and that of
    a group which a schedule keeps at zero while others train not at all: it is thawed later. Who trains a head alone gives the
    optimizer the head alone: what nobody holds counts only where it is a small part, or a whole model that a wrapper reduces the
    gradients of. A network that only judges (a perceptual loss) is not wrapped.

What to do
    Keep the weights that the optimizer steps in fp32 and compute under autocast; look for code that writes to them after the step
    (`holter explain rounded_away_updates`, `precision_round_trip`, `lost_update`).
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from holter.faults.shared.streaks import Streak, find_streak
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import names_text, ranks_text
from holter.faults.window import Window
from holter.records import Census, Evidence, Finding, ModuleVitals, Vitals

NARROW = ("bfloat16", "float16")
EPSILON = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half a unit in the last place of the number one."""


@dataclass(frozen=True)
class StillWeights:
    """Judges what steps change."""

    name: ClassVar[str] = "still_weights"

    num_vitals: int = 3
    """Number of reports in a row that must show it."""
    min_steps: int = 8
    """Number of steps over which few elements changed."""
    max_changed: float = threshold(0.1, above=0, below=1)
    """Share of all sampled elements that a step changes, below which few changed."""
    max_changed_in_module: float = 0.2
    """Share of changed elements below which a module counts as still; still ones must hold most elements."""
    min_zero_steps: int = threshold(16, at_least=2)
    """Number of steps over which the rate was exactly zero."""
    unheld_steps: int = threshold(24, at_least=2)
    """Number of steps over which no optimizer stepped a tensor with a gradient."""
    max_unheld: float = threshold(0.25, above=0, below=1)
    """Largest share of the trainable tensors that were forgotten if no optimizer holds them; twice that if they are not the model's beginning."""
    min_rate: float = 0.1
    """Share of the largest learning rate seen, below which few changed elements do not count."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding, in this order: no rate, no step, rounded away, rounded on purpose, lost."""
        census = next(iter(window.models.census.values()), None)
        rateless = find_streak(
            window,
            Vitals,
            lambda vitals: vitals.without_rate.count > 0,
            at_least=self.num_vitals,
            min_steps=self.min_zero_steps,
        )
        if rateless and (names := _always(rateless)):
            yield _rate_zero(rateless, names)
            return

        def is_forgotten(vitals: Vitals) -> bool:
            return self._is_forgotten(vitals, census)

        unheld = find_streak(window, Vitals, is_forgotten, at_least=self.num_vitals, min_steps=self.unheld_steps)
        if unheld and is_forgotten(unheld.last[1]):
            yield _unheld(unheld)
            return
        away = find_streak(window, Vitals, self._is_rounded_away, at_least=self.num_vitals, min_steps=self.min_steps)
        if (
            away
            and self._is_at_work(window, away)
            and not _has_master_copies(census)
            and not _is_stochastic(census, away)
        ):
            yield _rounded_away(away)
            return
        tiny = find_streak(window, Vitals, self._changes_little, at_least=self.num_vitals, min_steps=self.unheld_steps)
        # A run that has learned all there is changes little too, but not from its first steps on.
        if tiny and tiny.first_step <= self.min_steps and self._is_at_work(window, tiny, len(tiny.notes) // 2):
            yield _rounded_away(tiny, dtypes=tuple(EPSILON))
            return
        trip = find_streak(window, Vitals, lambda vitals: vitals.rounded.count > 0, at_least=self.num_vitals)
        if trip:
            yield _round_trip(trip)
            return
        is_adaptive = _is_adaptive(census)
        lost = find_streak(
            window, Vitals, lambda vitals: bool(_lost(vitals, is_adaptive=is_adaptive)), at_least=self.num_vitals
        )
        if lost and (names := _always_lost(lost, is_adaptive=is_adaptive)):
            yield _lost_update(lost, names)

    def _is_forgotten(self, vitals: Vitals, census: Census | None) -> bool:
        """Whether parameters without optimizer were forgotten.

        Later layers or a few tensors were; a model's beginning may be left out on purpose.
        """
        count, share = vitals.unheld.count, self.max_unheld
        if vitals.is_unheld_wrapped:
            return True
        if census is not None and not _is_beginning(census, vitals.unheld.names):
            share *= 2
        return count > 0 and (vitals.is_unheld_at_rest is True or count <= share * (count + vitals.num_trainable))

    def _is_rounded_away(self, vitals: Vitals) -> bool:
        known = [module for module in vitals.modules if not math.isnan(module.changed) and module.gradient_norm > 0]
        total = sum(module.numel for module in known)
        still = sum(m.numel for m in known if m.dtype in NARROW and m.changed < self.max_changed_in_module)
        return total > 0 and still > total / 2 and _share_changed(vitals) < self.max_changed

    def _changes_little(self, vitals: Vitals) -> bool:
        # Modules without a learning rate are frozen by that.
        moving = msgspec.structs.replace(vitals, modules=[m for m in vitals.modules if m.learning_rate > 0])
        return _share_changed(moving) < self.max_changed and not any(m.dtype in NARROW for m in vitals.modules)

    def _is_at_work(self, window: Window, streak: Streak[Vitals], since: int = 0) -> bool:
        """Whether the learning rate is near its peak, and not still rising since this note."""
        first, last = (
            max((m.learning_rate for m in vitals.modules), default=0.0)
            for _, vitals in (streak.notes[since], streak.last)
        )
        seen = [spread.high for _, spread in window.values("learning_rate") if math.isfinite(spread.high)]
        return 0 < last <= first * 1.01 and last >= self.min_rate * max((first, *seen))


def _is_beginning(census: Census, names: Collection[str]) -> bool:
    """Whether these come before all others that are to be trained."""
    chosen, ours = set(names), [entry.name for entry in census.entries if entry.requires_grad and not entry.is_buffer]
    return bool(chosen & set(ours[: len(chosen)]))


def _share_changed(vitals: Vitals) -> float:
    """Return the share of changed elements over all modules, weighted by their elements with a gradient."""
    pairs = [
        (m.changed, m.numel * (1 - (0.0 if math.isnan(m.gradient_zeros) else m.gradient_zeros))) for m in vitals.modules
    ]
    known = [(changed, num) for changed, num in pairs if not math.isnan(changed) and num > 0]
    total = sum(num for _, num in known)
    return sum(changed * num for changed, num in known) / total if total else math.nan


def _has_master_copies(census: Census | None) -> bool:
    """Whether the optimizer steps wider copies, not the narrow weights."""
    if census is None:
        return False
    return any(census.num_foreign_with_gradient) or not any(
        e.optimizer >= 0 and e.dtype in NARROW for e in census.entries
    )


def _is_adaptive(census: Census | None) -> bool:
    return census is not None and bool(census.optimizers) and all("Ada" in name for name in census.optimizers)


def _is_stochastic(census: Census | None, streak: Streak[Vitals]) -> bool:
    """Whether weights are rounded at random, which changes few elements by much.

    The update is then larger than without rounding.
    """
    if not _is_adaptive(census):
        return False
    still = [m for m in streak.last[1].modules if m.dtype in NARROW and m.update_ratio > 0 and m.weight_norm > 0]
    above = sum(m.numel for m in still if m.update_ratio * m.weight_norm > 1.2 * m.learning_rate * math.sqrt(m.numel))
    return above > sum(m.numel for m in still) / 2


def _module_of(name: str, vitals: Vitals) -> ModuleVitals | None:
    """Return the innermost described module that holds this tensor."""
    holders = [m for m in vitals.modules if name.startswith(f"{m.module}.") or not m.module]
    return max(holders, key=lambda module: len(module.module), default=None)


def _lost(vitals: Vitals, *, is_adaptive: bool) -> list[str]:
    """Return unchanged tensors.

    Left out are those whose updates an adaptive optimizer may have lost by rounding in a narrow dtype.
    """
    holders = {name: _module_of(name, vitals) for name in vitals.unchanged.names}
    return [name for name, held in holders.items() if not (is_adaptive and held is not None and held.dtype in NARROW)]


def _always_lost(streak: Streak[Vitals], *, is_adaptive: bool) -> tuple[str, ...]:
    every = [set(_lost(vitals, is_adaptive=is_adaptive)) for _, vitals in streak.notes]
    return tuple(name for name in streak.last[1].unchanged.names if all(name in names for names in every))


def _always(streak: Streak[Vitals]) -> tuple[str, ...]:
    """Return the tensors that had a gradient and no rate in every report."""
    every = [set(vitals.without_rate.names) for _, vitals in streak.notes]
    return tuple(name for name in streak.last[1].without_rate.names if all(name in names for names in every))


def _rate_zero(streak: Streak[Vitals], names: tuple[str, ...]) -> Finding:
    vitals = streak.last[1]
    is_all = vitals.without_rate.count >= vitals.num_trainable - vitals.no_gradient.count - vitals.zero_gradient.count
    whose = "every trained tensor" if is_all else names_text(names, vitals.without_rate.count)
    return _finding(
        streak,
        tensors=names,
        summary=f"The learning rate of {whose} has been exactly zero since step {streak.first_step}: steps change nothing there.",
        facts={"is_rate_zero": True},
        evidence=(
            Evidence(
                kind="schedule",
                summary=f"{ranks_text(streak.ranks)}: {vitals.without_rate.count} of {vitals.num_trainable} trained tensors had a gradient and a learning rate of exactly zero at {len(streak.notes)} checked steps in a row, to step {streak.last[0].step}",
                values={"count": vitals.without_rate.count, "num_trainable": vitals.num_trainable},
            ),
        ),
    )


def _unheld(streak: Streak[Vitals]) -> Finding:
    vitals = streak.last[1]
    names, count = tuple(vitals.unheld.names), vitals.unheld.count
    who = "the optimizer that holds them is never stepped" if vitals.is_unheld_at_rest else "no optimizer holds them"
    if vitals.is_unheld_wrapped:
        who = "no optimizer holds anything of this model, though it was wrapped to be trained"
    return _finding(
        streak,
        tensors=names,
        summary=f"{names_text(names, count)} {'gets' if count == 1 else 'get'} a gradient at each step and no step: {who}.",
        facts={"is_unheld": True, "is_unheld_at_rest": bool(vitals.is_unheld_at_rest)},
        evidence=(
            Evidence(
                kind="identity",
                summary=f"{ranks_text(streak.ranks)}: {count} trainable tensors had a gradient at {len(streak.notes)} checked steps, to step {streak.last[0].step}, and were in no optimizer that stepped; {vitals.num_trainable} others were; {who}",
                values={"count": count, "num_trainable": vitals.num_trainable},
            ),
        ),
    )


def _rounded_away(streak: Streak[Vitals], dtypes: Collection[str] = NARROW) -> Finding:
    vitals = streak.last[1]
    still = [m for m in vitals.modules if m.dtype in dtypes and m.changed < StillWeights.max_changed_in_module]
    share, rate = _share_changed(vitals), max(module.learning_rate for module in still)
    numbers = Evidence(
        kind="update",
        summary=f"a step changes {share:.2%} of the elements that have a gradient; {len(still)} modules in {names_text(sorted({m.dtype for m in still}))} change less than {StillWeights.max_changed_in_module:.0%}",
        values={"changed": share, "num_modules": len(still), "modules": {m.module: m.changed for m in still[:16]}},
    )
    size = Evidence(
        kind="precision",
        summary=f"the learning rate is {rate:.3g}; a {still[0].dtype} weight of 0.1 can only move by {0.125 * EPSILON[still[0].dtype]:.3g} or more",
        values={"learning_rate": rate, "dtype": still[0].dtype},
    )
    return _finding(
        streak,
        modules=tuple(module.module for module in still),
        summary=f"A step changes only {share:.1%} of the trained elements: the weights are in {still[0].dtype} and the updates are rounded away.",
        facts={
            "is_narrow": dtypes is NARROW or None,
            "is_rate_too_small": dtypes is not NARROW,
            "does_little_change": True,
            "is_rate_at_work": True,
        },
        evidence=(numbers, size),
    )


def _round_trip(streak: Streak[Vitals]) -> Finding:
    named = streak.last[1].rounded
    proof = Evidence(
        kind="precision",
        summary=f"{ranks_text(streak.ranks)}: {named.count} trained fp32 tensors have changed since the start and their low mantissa bits are all zero, at {len(streak.notes)} checks in a row: {names_text(named.names, named.count)}",
        values={"count": named.count, "num_checks": len(streak.notes)},
    )
    return _finding(
        streak,
        tensors=tuple(named.names),
        summary=f"Trained fp32 weights are rounded to a narrower dtype at every step ({named.count} tensors on {ranks_text(streak.ranks)}).",
        facts={"is_rounded": True, "is_narrow": False},
        evidence=(proof,),
    )


def _lost_update(streak: Streak[Vitals], names: tuple[str, ...]) -> Finding:
    vitals = streak.last[1]
    module = _module_of(names[0], vitals)
    proof = Evidence(
        kind="history",
        summary=f"{ranks_text(streak.ranks)}: no bit of {names_text(names)} changed at {len(streak.notes)} checked steps in a row, though the optimizer stepped",
        values={"num_checks": len(streak.notes), "num_tensors": len(names)},
    )
    sizes = []
    if module is not None:
        text = f"gradients of up to {module.gradient_absmax:.3g} at a learning rate of {module.learning_rate:.3g}, weights of norm {module.weight_norm:.3g}"
        values = {"gradient_absmax": module.gradient_absmax, "learning_rate": module.learning_rate}
        sizes = [
            Evidence(kind="update", summary=f"{module.module}: {text}: more than rounding can hide", values=values)
        ]
    return _finding(
        streak,
        tensors=names,
        summary=f"{names_text(names)} did not change at all although the optimizer stepped with a gradient.",
        facts={"is_unchanged": True, "is_update_large_enough": True},
        evidence=(proof, *sizes),
    )


def _finding(  # noqa: PLR0913 - the parts of a finding
    streak: Streak[Vitals],
    *,
    summary: str,
    facts: dict[str, bool | None],
    evidence: tuple[Evidence, ...],
    tensors: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
) -> Finding:
    kinds = ("does_little_change", "is_rounded", "is_unchanged", "is_rate_zero", "is_unheld", "is_unheld_at_rest")
    unseen = dict.fromkeys(kinds, False)
    return Finding(
        detector=StillWeights.name,
        severity="warning",
        first_step=streak.first_step,
        detected_step=streak.last[0].step,
        ranks=streak.ranks,
        tensors=tensors,
        modules=modules,
        summary=summary,
        facts={**unseen, **facts},
        evidence=evidence,
    )
