"""Vanishing gradients: some trained modules get gradients too small to learn from, check after check.

What it detects
    Modules whose gradient norm, at five checks or more in a row, is not zero and yet below 1e-8 and a millionth of the largest, or below
    a millionth of the middle one of their peers. All modules together, where from one check to the next their norm fell to a
    ten-thousandth of what it had been, and stayed there for three checks. And single matrices whose gradient is not zero and a
    hundred-millionth of the largest tensor's or less, at as many checks over sixteen steps or more, whatever else their module has.

Why it matters
    Those modules stay as they were initialised, while the rest learns around them.

False positives
    Gradients that are exactly zero are left to `missing_gradients`. A run that has converged has small gradients everywhere, not beside
    large ones, and they got there step by step. Gates and adapters that begin at zero give their neighbours tiny gradients that grow
    with each step, and are silent.

What to do
    Look at what lies between the named modules and the loss: saturated activations, missing residual paths or normalisation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from holter.faults.shared.streaks import Streak, find_streak
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed, modules_of, named
from holter.faults.window import Window
from holter.records import Evidence, Finding, Vitals

MAX_SHOWN = 5
LEAST_BEFORE, LEAST_AFTER = 3, 3
"""Number of checks before and after a fall of all modules."""

Norms = Mapping[str, float]
"""Module -> gradient norm."""
Checks = Mapping[int, Norms]
"""Step -> norms of the modules."""


@dataclass(frozen=True)
class GradientVanishing:
    """Compares modules with their peers."""

    name: ClassVar[str] = "gradient_vanishing"

    floor: float = 1e-8
    """A norm below this is too small for float32."""
    ratio: float = 1e-7
    """A module's gradient is too small if the ratio of its norm to its peers' is below this."""
    min_checks: int = threshold(5, at_least=2)  # One check shows no trend.
    """Number of checks in a row until now."""
    min_steps: int = 16
    """Number of steps that the checks of a single matrix must span."""
    fall: float = 1e-4
    """Share of what it was to which the norm of all modules falls from one check to the next."""
    max_growth: float = 1.5
    """A norm that grows by more than this over those checks is on its way."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding, with all such modules."""
        checks = gradient_norms(window)
        if len(checks) < self.min_checks:
            return
        steps = sorted(checks)
        tiny = {step: self._tiny(checks[step]) for step in steps}
        found = [name for name in tiny[steps[-1]] if self._is_lasting(name, steps, checks, tiny)]
        if found:
            since = {name: _since(name, steps, tiny) for name in found}
            yield _finding(window, checks, steps, since)
        elif (fallen := self._fallen(checks)) is not None:
            yield _of_all(window, *fallen, steps[-1])
        elif streak := find_streak(window, Vitals, _has_faint, at_least=self.min_checks, min_steps=self.min_steps):
            faint = [set(vitals.faint.names) for _, vitals in streak.notes]
            if names := tuple(name for name in streak.last[1].faint.names if all(name in seen for seen in faint)):
                yield _of_tensors(window, streak, names)

    def _tiny(self, norms: Mapping[str, float]) -> set[str]:
        if len(norms) < 2:  # noqa: PLR2004 - no peers
            return set()
        largest, middle = max(norms.values()), median(norms.values())
        limit = max(min(self.floor, self.ratio * largest), self.ratio * middle)
        return {name for name, norm in norms.items() if 0 < norm < limit}

    def _fallen(self, checks: Checks) -> tuple[int, float, float] | None:
        """Return (step, before, now) of a norm that left its own history downward, at once and for all modules."""
        common = set.intersection(*(set(norms) for norms in checks.values()))
        totals = [(step, math.hypot(*(norms[name] for name in common))) for step, norms in checks.items()]
        for place in range(LEAST_BEFORE, len(totals) - LEAST_AFTER + 1):
            before, now = min(total for _, total in totals[:place]), max(total for _, total in totals[place:])
            if 0 < now < self.fall * before and totals[-1][1] > 0:
                return totals[place][0], totals[place - 1][1], now
        return None

    def _is_lasting(self, name: str, steps: Sequence[int], checks: Checks, tiny: Mapping[int, set[str]]) -> bool:
        begin = steps.index(_since(name, steps, tiny))
        norms = [checks[step][name] for step in steps[begin:]]
        part = max(1, len(norms) // 3)
        is_growing = median(norms[-part:]) > self.max_growth * median(norms[:part])
        return len(norms) >= self.min_checks and not is_growing


def _has_faint(vitals: Vitals) -> bool:
    return vitals.faint.count > 0


def _of_all(window: Window, first: int, before: float, now: float, last: int) -> Finding:
    return Finding(
        detector=GradientVanishing.name,
        severity="warning",
        first_step=first,
        detected_step=last,
        ranks=tuple(sorted(window.attached)),
        summary=f"All gradients fell at once: their norm was {before:.2g} and has been {now:.2g} or less since step {first}.",
        facts={
            "is_from_start": False,
            "is_zero_elsewhere": False,
            "is_growing": False,
            "series": ["gradient_norm", "loss"],
        },
        evidence=(
            Evidence(
                kind="trend",
                summary=f"norm of what the optimizer is given: {before:.2g} at the check before step {first}, at most {now:.2g} from there to step {last}",
                values={"before": before, "now": now},
            ),
        ),
    )


def _of_tensors(window: Window, streak: Streak[Vitals], names: tuple[str, ...]) -> Finding:
    told = min(note.step for note, _ in window.notes_of(Vitals))
    return Finding(
        detector=GradientVanishing.name,
        severity="warning",
        first_step=streak.first_step,
        detected_step=streak.last[0].step,
        ranks=tuple(sorted(window.attached)),
        tensors=names,
        modules=modules_of(names),
        summary=f"{named(names)} {'has' if len(names) == 1 else 'have'} had next to no gradient since step {streak.first_step}, beside others of ordinary size.",
        facts={
            "is_from_start": streak.first_step == told,
            "is_zero_elsewhere": False,
            "is_growing": False,
            "series": ["gradient_norm", "loss"],
        },
        evidence=(
            Evidence(
                kind="gradient",
                summary=f"the gradient's norm is not zero and a hundred-millionth of the largest tensor's or less, at {len(streak.notes)} checks in a row, to step {streak.last[0].step}: {named(names)}",
                values={"num_checks": len(streak.notes), "num_tensors": len(names)},
            ),
        ),
    )


def _since(name: str, steps: Sequence[int], tiny: Mapping[int, set[str]]) -> int:
    """Return the first of the checks in a row, until the last one, at which this module was tiny."""
    first = steps[-1]
    for step in reversed(steps):
        if name not in tiny[step]:
            break
        first = step
    return first


def _finding(window: Window, checks: Checks, steps: Sequence[int], since: Mapping[str, int]) -> Finding:
    first, last = min(since.values()), steps[-1]
    names = sorted(since, key=lambda name: checks[last][name])
    largest_name, largest = max(checks[last].items(), key=lambda item: item[1])
    num_checks = sum(step >= first for step in steps)
    shown = listed(f"{name} {checks[last][name]:.2g}" for name in names[:MAX_SHOWN])
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return Finding(
        detector=GradientVanishing.name,
        severity="warning",
        first_step=first,
        detected_step=last,
        ranks=tuple(sorted(window.attached)),
        modules=tuple(names),
        summary=f"{len(names)} of {len(checks[last])} modules have had next to no gradient since step {first}: {names[0]} "
        f"{checks[last][names[0]]:.2g}, while {largest_name} has {largest:.2g}.",
        facts={
            "is_from_start": first == steps[0],
            "is_zero_elsewhere": any(norm == 0 for norm in checks[last].values()),
            "is_growing": False,
            "series": ["gradient_norm", "loss"],
        },
        evidence=(
            Evidence(
                kind="modules",
                summary=f"gradient norms at step {last}: {shown}{more}; the largest is {largest_name} {largest:.2g}; so at {num_checks} checks in a row",
                values={
                    "step": last,
                    "norms": {name: checks[last][name] for name in names[:MAX_SHOWN]},
                    "largest": largest,
                    "num_checks": num_checks,
                },
            ),
        ),
    )


def gradient_norms(window: Window) -> dict[int, Norms]:
    """Return norms by step, ascending, from the first rank that reported each step.

    Only modules with a learning rate above zero count.
    """
    found: dict[int, Norms] = {}
    for note, vitals in window.notes_of(Vitals):
        norms = {
            module.module: module.gradient_norm
            for module in vitals.modules
            if module.learning_rate > 0 and math.isfinite(module.gradient_norm)
        }
        found.setdefault(note.step, norms)
    return dict(sorted(found.items()))
