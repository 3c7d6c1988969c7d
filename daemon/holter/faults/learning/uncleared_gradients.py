"""Uncleared gradients: what one step leaves in the gradients is added to the next one's.

What it detects
    Gradients that are there, and not zero, before the first backward pass of a step, at several checked steps in a row, and that
    grow: nobody calls `zero_grad`, or it is called on something else than what is stepped. Where they are clipped they do not grow: that is
    a warning after many steps.

Why it matters
    Every step applies the sum of all gradients so far. It looks like a learning rate that rises with every step: fast at first,
    then a loss that swings and diverges.

False positives
    Gradients that wait between two backward passes of one step are accumulation and do not count, nor do zeros that
    `zero_grad(set_to_none=False)` leaves. With several optimizers in a script the gradients of the one that rests stay from its own
    last pass, but do not add up: there they must have grown by far more before anything is said.

What to do
    Call `optimizer.zero_grad()` once a step, before the first backward pass (`holter explain gradients_never_cleared`).
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.streaks import Streak, find_streak
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Finding, Vitals

SHORT_OF_ROOT = 0.8
"""Share of the root of the number of summed gradients, to allow for those that shrink in training."""
NUM_COMPARED = 4
"""Number of steps at either end of the gradient norm's history."""


@dataclass(frozen=True)
class UnclearedGradients:
    """Judges left-over gradients that grow."""

    name: ClassVar[str] = "uncleared_gradients"

    min_steps: int = 4
    """Number of checked steps in a row that began with left-over gradients."""
    min_growth: float = threshold(1.2, above=1)
    """Ratio of the norm of the left-over gradients to what it was at first."""
    min_lasting_steps: int = threshold(16, at_least=2)
    """Number of checked steps in a row, with several optimizers or if the gradients do not grow."""
    num_vitals: int = 2
    """Number of reports in a row that must show it."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        is_one = max((len(census.optimizers) for census in window.models.census.values()), default=1) <= 1
        streak = find_streak(
            window, Vitals, self._grows if is_one else self._grows_like_a_sum, at_least=self.num_vitals
        )
        if streak is None and is_one:
            streak = find_streak(window, Vitals, self._lasts, at_least=self.num_vitals)
        if streak is not None:
            yield _finding(window, streak, does_grow=not is_one or self._grows(streak.last[1]))

    def _grows(self, vitals: Vitals) -> bool:
        return vitals.uncleared_steps >= self.min_steps and vitals.uncleared_growth > self.min_growth

    def _lasts(self, vitals: Vitals) -> bool:
        return vitals.uncleared_steps >= self.min_lasting_steps

    def _grows_like_a_sum(self, vitals: Vitals) -> bool:
        """Whether the left-over gradients grow like a sum.

        A sum grows with the root of the number of independent gradients, or with the number of equal ones.
        """
        num = vitals.uncleared_steps
        return num >= self.min_lasting_steps and vitals.uncleared_growth > SHORT_OF_ROOT * math.sqrt(num)


def _finding(window: Window, streak: Streak[Vitals], *, does_grow: bool) -> Finding:
    note = streak.last[0]
    first_note, first = streak.notes[0]
    first_step = max(0, first_note.step - first.uncleared_steps + 1)
    norms = [(step, spread.mean) for step, spread in window.values("gradient_norm") if step >= first_step]
    growth = _norm_growth([norm for step, norm in norms if step <= note.step])
    return Finding(
        detector=UnclearedGradients.name,
        severity="critical" if does_grow else "warning",
        first_step=first_step,
        detected_step=note.step,
        ranks=streak.ranks,
        summary=f"Gradients have not been cleared since step {first_step}: each step adds to what the steps before left, and applies the sum.",
        facts={
            "is_left_over": True,
            "does_grow": does_grow or None,
            "does_last": not does_grow,
            "does_norm_grow": None if growth is None else growth > 1,
            "has_one_optimizer": max((len(census.optimizers) for census in window.models.census.values()), default=1)
            <= 1,
        },
        evidence=tuple(_evidence(streak, growth)),
    )


def _norm_growth(norms: list[float]) -> float | None:
    if len(norms) < 2 * NUM_COMPARED:
        return None
    before, after = statistics.median(norms[:NUM_COMPARED]), statistics.median(norms[-NUM_COMPARED:])
    return after / before if before > 0 and math.isfinite(after) else None


def _evidence(streak: Streak[Vitals], growth: float | None) -> Iterator[Evidence]:
    note, vitals = streak.last
    yield Evidence(
        kind="gradient",
        summary=f"{ranks_text(streak.ranks)}: at {vitals.uncleared_steps} checked steps in a row, up to step {note.step}, gradients were there before the first backward pass",
        values={"num_steps": vitals.uncleared_steps, "step": note.step},
    )
    yield Evidence(
        kind="gradient",
        summary=f"their norm is {vitals.uncleared_growth:.3g} times what it was when this began",
        values={"growth": vitals.uncleared_growth},
    )
    if growth is not None:
        yield Evidence(
            kind="history",
            summary=f"the gradient norm of the steps is {growth:.3g} times what it was at first",
            values={"growth": growth},
        )
