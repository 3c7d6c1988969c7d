"""Overfitting: the training loss falls while the evaluation loss rises.

What it detects
    At least four evaluations since the best one, each clearly above it and rising, while the training loss went on falling. Evaluation
    losses are known by the names under which the script logs them: `eval_loss`, `val/loss`, `valid_loss`, `test_loss`.

Why it matters
    Every further step makes the model worse at what it is for, and the last checkpoint is not the best one.

False positives
    An evaluation loss that scatters, or that rises by less than a fifth, is silent, and so is one that rises together with the training
    loss: that is divergence.

What to do
    Take the checkpoint of the best evaluation. More data, more regularisation or fewer epochs come after that.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import ClassVar

from holter.faults.shared.robust import Points, deviation, finite, values
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

HELD_OUT = re.compile(r"(^|[/_.])(eval|evaluation|val|valid|validation|test|dev)([/_.]|$)")

MAX_COMPARED = 30
"""Number of evaluations that are compared; pairs grow with its square."""


@dataclass(frozen=True)
class Overfitting:
    """Judges the trends of both losses."""

    name: ClassVar[str] = "overfitting"

    min_evaluations: int = threshold(4, at_least=2)  # One evaluation shows no trend.
    """Number of evaluations that there must be since the best one."""
    rise: float = 0.2
    """Share by which the last evaluations must exceed the best."""
    fall: float = 0.1
    """Share by which the training loss must have fallen meanwhile."""
    deviations: float = 4.0
    """They must be this far above the best, in deviations of the difference between neighbouring evaluations."""
    rising: float = 0.75
    """Share of pairs of evaluations since the best in which the later one is higher."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first evaluation loss that departs."""
        training = finite(window.values("loss"))
        for name in _evaluation_names(window):
            evaluations = finite(window.values(name))
            best = self._best(evaluations)
            if best is None:
                continue
            fell = _fall(training, best[0], evaluations[-1][0])
            if fell and fell[1] < (1 - self.fall) * fell[0]:
                yield _finding(window, name, evaluations, best, fell)
                return

    def _best(self, evaluations: Points) -> tuple[int, float] | None:
        """Return the best evaluation, if all later ones are clearly above it and rising."""
        if len(evaluations) < self.min_evaluations + 2:
            return None
        place = min(range(len(evaluations)), key=lambda i: evaluations[i][1])
        step, lowest = evaluations[place]
        since = evaluations[place + 1 :]
        if lowest <= 0 or len(since) < self.min_evaluations:
            return None
        series = values(since)
        scatter = max(deviation([b - a for a, b in pairwise(run)]) for run in (series, values(evaluations)))
        is_clear = median(series[-self.min_evaluations :]) > max(
            (1 + self.rise) * lowest, lowest + self.deviations * scatter
        )
        pairs = [b > a for a, b in combinations(series[-MAX_COMPARED:], 2)]
        is_rising = sum(pairs) >= self.rising * len(pairs)
        level = median(series[-self.min_evaluations :])
        # Once all is memorised, it rises no more but does not come back either.
        is_lost = level > 2 * lowest and level - lowest > 0.67 * (max(series) - lowest)
        return (step, lowest) if is_clear and (is_rising or is_lost) else None


def _evaluation_names(window: Window) -> list[str]:
    names = {name for entry in window.series for name in entry.numbers if name.startswith("log.")}
    return sorted(
        name for name in names if "loss" in name.lower() and HELD_OUT.search(name.lower().removeprefix("log."))
    )


def _fall(training: Points, since: int, until: int) -> tuple[float, float] | None:
    """Return (level at the best evaluation, level now) of the training loss; None if it is not known."""
    num = 10
    before = [value for step, value in training if step <= since][-num:]
    now = [value for step, value in training if step <= until][-num:]
    return (median(before), median(now)) if len(before) == num and len(now) == num and median(before) > 0 else None


def _finding(
    window: Window, name: str, evaluations: Points, best: tuple[int, float], fell: tuple[float, float]
) -> Finding:
    step, lowest = best
    last_step, last = evaluations[-1]
    num = sum(when > step for when, _ in evaluations)
    shown = name.removeprefix("log.")
    return Finding(
        detector=Overfitting.name,
        severity="warning",
        first_step=step,
        detected_step=last_step,
        ranks=tuple(sorted(window.attached)),
        summary=f"`{shown}` rises since step {step}, from {lowest:.4g} to {last:.4g}, while the training loss fell from {fell[0]:.4g} to {fell[1]:.4g}.",
        facts={"is_training_falling": True, "is_evaluation_rising": True, "series": ["loss", name]},
        evidence=(
            Evidence(
                kind="trend",
                summary=f"`{shown}`: best {lowest:.4g} at step {step}, above it at all {num} evaluations since, {last:.4g} at step {last_step}",
                values={"name": shown, "best_step": step, "best": lowest, "last": last, "num_evaluations": num},
            ),
            Evidence(
                kind="trend",
                summary=f"training loss: {fell[0]:.4g} around step {step}, {fell[1]:.4g} now",
                values={"before": fell[0], "now": fell[1]},
            ),
        ),
    )
