"""Loss trend: the loss rises and does not come back, or has never moved.

What it detects
    Divergence: a loss that stands far above its best stretch (eight robust deviations, twice its level, half of the way back to where
    it started) for thirty steps until now, and is not on its way down; or a loss whose sign turned from one step to the next
    and that has grown on that side since. Plateau, as information only: four hundred steps or more without
    any movement of the trend against its noise, at a level that was never left; of a loss that classifies and is no better than guessing
    after a hundred and fifty steps, the last hundred of them at a learning rate that does not rise, information too.

Why it matters
    Neither raises an error. Both spend machines on nothing.

False positives
    A noisy loss with rare spikes that come back, a restart of the schedule, a loss that bounces near zero, and another model or other
    layers trained from some step on are silent, as is a loss that goes below zero by small steps. The loss of a policy is about zero
    whatever it learns, and rises with the distance from its reference: up to ten it is not judged, nor is a loss that began at zero.
    Random labels have a plateau and deserve the information, as does a range test of the learning rate.

What to do
    Look first for a better-fitting cause: data, learning rate, gradients that do not arrive. This is what is left without one.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import ClassVar

from holter.faults.shared.range_test import apart_from_tests
from holter.faults.shared.robust import (
    BEYOND_RETURN,
    Points,
    Rise,
    deviation,
    find_rise,
    finite,
    is_surrogate,
    slope,
    values,
)
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding, Labels

BLOCK = 20
"""Number of steps whose median is one point of the trend."""
TURNED = 12
"""Number of steps after a change of sign that must go on in that direction."""
FAR = 3.0
"""Times what the loss usually moves from one step to the next."""
SERIES = ("loss", "learning_rate", "gradient_norm")
RESTING = 100
"""Number of newest steps in which the learning rate must not rise."""
RISING = 1.02
FAR_ABOVE = 1.3
"""Times the loss of guessing: above that, something else is added to the loss, or wrong."""
TERM = "log.loss_terms."
GOOD_PART = 0.25
"""Share of all logged terms in the best stretch."""
MOST_TRADED = 3.0
"""Times its best level up to which a loss may rise while a good part of it falls."""


@dataclass(frozen=True)
class LossTrend:
    """Judges the course of the loss."""

    name: ClassVar[str] = "loss_trend"

    stay: int = threshold(30, at_least=1)
    """Number of steps that a rise must last."""
    plateau_steps: int = threshold(400, at_least=5 * BLOCK)
    """Number of steps without movement after which a plateau is reported."""
    converged: float = 0.05
    """A loss below this is not stuck but has converged."""
    guessing_steps: int = threshold(150, at_least=100)
    """Number of steps after which a loss that is no better than guessing is reported."""
    guessing: float = threshold(0.985, above=0.5)
    """Share of the loss of guessing from which on nothing was learned."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        yield from apart_from_tests(window, self._judged)

    def _judged(self, window: Window) -> Iterator[Finding]:
        losses = finite(window.values("loss"))
        rise = find_rise(losses, stay=self.stay)
        if rise is not None:
            is_meant = _is_changed_on_purpose(window, rise) or _is_traded(window, rise)
            if not is_meant and not is_surrogate(window, losses, rise):
                yield _of_rise(window, rise)
        elif (turn := _turn(losses)) is not None:
            yield _of_turn(window, losses, turn)
        elif (level := self._guessing(window, losses)) is not None:
            yield _of_guessing(window, losses, level)
        elif (still := self._stillness(losses)) is not None:
            yield _of_plateau(window, losses, *still)

    def _guessing(self, window: Window, losses: Points) -> float | None:
        """Return the loss of guessing if the loss never got better than it, although the rate no longer rises.

        Otherwise None.
        """
        if len(losses) < self.guessing_steps or losses[0][0] > 1:
            return None
        level = _loss_of_guessing(window)
        rates = [spread.high for _, spread in window.values("learning_rate")][-RESTING:]
        if level is None or not rates or rates[-1] <= 0 or rates[-1] > RISING * rates[0]:
            return None
        divided = _num_divided(window)
        series = [value * divided for value in values(losses)]
        # In no part of the run: what was learned and lost again is another matter.
        blocks = [median(series[i : i + BLOCK]) for i in range(0, len(series) - BLOCK + 1, BLOCK)]
        is_stuck = min(blocks) >= self.guessing * level and max(blocks[-3:]) < FAR_ABOVE * level
        return level if is_stuck else None

    def _stillness(self, losses: Points) -> tuple[float, float, float] | None:
        """Return (level, noise, movement) of a loss that has not moved in all remembered steps, or None."""
        if len(losses) < self.plateau_steps:
            return None
        series = values(losses)
        blocks = [median(series[i : i + BLOCK]) for i in range(0, len(series) - BLOCK + 1, BLOCK)]
        level, noise = median(series), deviation(series)
        movement = slope([(float(i), block) for i, block in enumerate(blocks)]) * len(blocks)
        # The error of a median of twenty values is 1.25 sigma / sqrt(20), about a quarter of the noise.
        scatter = max(noise / 4, 1e-4 * abs(level))
        spread = max(blocks) - min(blocks)
        is_still = abs(movement) < scatter and abs(blocks[-1] - blocks[0]) < 4 * scatter and spread < 8 * scatter
        return (level, noise, movement) if is_still and abs(level) > self.converged else None


def _is_changed_on_purpose(window: Window, rise: Rise) -> bool:
    """Whether other tensors began to be trained at just that step: then another loss is no fault."""
    near = range(rise.first_step - 2, rise.first_step + 3)
    return any(
        change.what in {"requires_grad", "new", "gone"} and change.step in near for change in window.models.changes
    )


def _is_traded(window: Window, rise: Rise) -> bool:
    """Whether a logged term that was a good part of the loss has fallen since its best stretch.

    It is then being learned at the cost of the rest.
    """
    if rise.best <= 0 or rise.factor > MOST_TRADED:
        return False
    names = {name for entry in window.series[-4:] for name in entry.numbers if name.startswith(TERM)}
    levels = {}
    for name in names:
        points = finite(window.values(name))
        before = [value for step, value in points if rise.best_step <= step < rise.best_step + BLOCK]
        now = [value for step, value in points if step > rise.last_step - BLOCK]
        if before and now:
            levels[name] = median(before), median(now), deviation(before)
    whole = sum(abs(before) for before, _, _ in levels.values())
    return any(
        before > GOOD_PART * whole and now < before and before - now > noise / 2
        for before, now, noise in levels.values()
    )


def _loss_of_guessing(window: Window) -> float | None:
    """Return the entropy of the labels given to a classifying loss; None if unknown.

    For tokens it is the logarithm of their number.
    """
    told = [labels for _, labels in window.notes_of(Labels)]
    sizes = {labels.num_classes for labels in told}
    if len(sizes) != 1 or min(sizes) < 2 or any(labels.is_weighted for labels in told):  # noqa: PLR2004 - one class is no choice
        return None
    counts = sum((Counter(labels.counts) for labels in told), Counter[int]())
    if not counts:
        return math.log(min(sizes))
    shares = [num / counts.total() for num in counts.values()]
    return -sum(share * math.log(share) for share in shares) or None


def _num_divided(window: Window) -> float:
    """Return the number by which an accumulating loop divided the loss that is known."""
    parts = window.values("micro_steps")[-1:]
    is_divided = window.values("loss.is_divided")[-1:]
    return parts[0][1].mean if parts and is_divided and is_divided[0][1].low == 1 else 1.0


def _of_guessing(window: Window, losses: Points, level: float) -> Finding:
    first, last = losses[0][0], losses[-1][0]
    now = median(values(losses)[-BLOCK:]) * _num_divided(window)
    return Finding(
        detector=LossTrend.name,
        severity="info",  # a trial on random labels is healthy, and looks like this
        first_step=first,
        detected_step=last,
        ranks=tuple(sorted(window.attached)),
        summary=f"The loss is no better than guessing after {len(losses)} steps: {now:.4g}; guessing costs {level:.4g}.",
        facts={
            "is_rising": False,
            "is_still": True,
            "is_at_guessing": True,
            "is_beyond_return": False,
            "came_back": None,
            "series": list(SERIES),
        },
        evidence=(
            Evidence(
                kind="trend",
                summary=f"loss: {median(values(losses)[:BLOCK]) * _num_divided(window):.4g} in the first {BLOCK} steps, {now:.4g} in the last; whoever knows the labels' frequencies and no input gets {level:.4g}",
                values={"now": now, "guessing": level, "num_steps": len(losses)},
            ),
        ),
    )


def _turn(losses: Points) -> int | None:
    """Return the index at which a positive loss turned in one step to as far below zero, and went on from there.

    None if it did not.
    """
    series = values(losses)
    place = next((i for i, value in enumerate(series) if value < 0), 0)
    before, after = series[max(0, place - BLOCK) : place], series[place:]
    if len(before) < BLOCK or len(after) < TURNED or max(after) >= 0:
        return None
    level, usual = median(before), max(abs(b - a) for a, b in pairwise(before))
    is_mirrored = level / 2 < -after[0] < 2 * level and before[-1] - after[0] > FAR * usual
    part = TURNED // 3
    is_going_on = -median(after[-part:]) > 1.5 * max(level, -median(after[:part]))
    return place if is_mirrored and is_going_on else None


def _of_turn(window: Window, losses: Points, place: int) -> Finding:
    series, first, last = values(losses), losses[place][0], losses[-1][0]
    before, now = median(series[place - BLOCK : place]), median(series[-5:])
    is_lost = -now > BEYOND_RETURN * before
    return Finding(
        detector=LossTrend.name,
        severity="critical" if is_lost else "warning",
        first_step=first,
        detected_step=last,
        ranks=tuple(sorted(window.attached)),
        summary=f"The loss changed its sign at step {first}, from {series[place - 1]:.3g} to {series[place]:.3g}, and has gone on to {now:.3g}: what should get smaller is made larger.",
        facts={
            "is_rising": True,
            "is_still": False,
            "is_beyond_return": is_lost,
            "came_back": False,
            "series": list(SERIES),
        },
        evidence=(
            Evidence(
                kind="trend",
                summary=f"loss: {before:.3g} in the {BLOCK} steps before step {first}, {series[place]:.3g} at it, {now:.3g} in the last; it was never below zero before",
                values={"before": before, "at": series[place], "now": now},
            ),
        ),
    )


def _of_rise(window: Window, rise: Rise) -> Finding:
    is_lost = rise.is_beyond_return
    return Finding(
        detector=LossTrend.name,
        severity="critical" if is_lost else "warning",
        first_step=rise.first_step,
        detected_step=rise.last_step,
        ranks=tuple(sorted(window.attached)),
        summary=f"The loss rises since step {rise.first_step} and does not come back: {rise.now:.3g}, after {rise.best:.3g} at its best.",
        facts={
            "is_rising": True,
            "is_still": False,
            "is_beyond_return": is_lost,
            "came_back": False,
            "series": list(SERIES),
        },
        evidence=(
            Evidence(
                kind="trend",
                summary=f"loss: {rise.start:.3g} at first, {rise.best:.3g} +- {rise.noise:.2g} in its best stretch, {rise.now:.3g} in the last steps, "
                f"above its history for {rise.num_steps} steps",
                values={
                    "start": rise.start,
                    "best": rise.best,
                    "noise": rise.noise,
                    "now": rise.now,
                    "factor": rise.factor if math.isfinite(rise.factor) else None,
                    "num_steps": rise.num_steps,
                },
            ),
        ),
    )


def _of_plateau(window: Window, losses: Points, level: float, noise: float, movement: float) -> Finding:
    first, last = losses[0][0], losses[-1][0]
    return Finding(
        detector=LossTrend.name,
        severity="info",
        first_step=first,
        detected_step=last,
        ranks=tuple(sorted(window.attached)),
        summary=f"The loss has not moved since step {first}: {level:.4g} for {len(losses)} steps.",
        facts={
            "is_rising": False,
            "is_still": True,
            "is_beyond_return": False,
            "came_back": None,
            "series": list(SERIES),
        },
        evidence=(
            Evidence(
                kind="trend",
                summary=f"loss: {level:.4g} +- {noise:.2g}; its trend moved by {movement:.2g} over {len(losses)} steps",
                values={"level": level, "noise": noise, "movement": movement, "num_steps": len(losses)},
            ),
        ),
    )
