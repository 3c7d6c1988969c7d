"""Loss trend: the loss rises and does not come back, or has never moved.

What it detects
    Divergence: a loss that stands far above its best stretch (eight robust deviations, twice its level, half of the way back to where
    it started) for thirty steps until now, and is not on its way down. Plateau, as information only: four hundred steps or more without
    any movement of the trend against its noise, at a level that was never left.

Why it matters
    Neither raises an error. Both spend machines on nothing.

False positives
    A noisy loss with rare spikes that come back, a restart of the schedule, a loss that bounces near zero, and another model or other
    layers trained from some step on are silent. The loss of a policy is about zero whatever it learns, and rises with the distance
    from its reference: up to ten it is not judged, nor is a loss that began at zero. Random labels have a plateau and deserve the
    information.

What to do
    Look first for a better-fitting cause: data, learning rate, gradients that do not arrive. This is what is left without one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from holter.faults.shared.robust import Points, Rise, deviation, find_rise, finite, is_surrogate, slope, values
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

BLOCK = 20
"""Steps whose median is one point of the trend."""
SERIES = ("loss", "learning_rate", "gradient_norm")


@dataclass(frozen=True)
class LossTrend:
    """Judges where the loss is going."""

    name: ClassVar[str] = "loss_trend"

    stay: int = threshold(30, at_least=1)
    """Steps that a rise must last."""
    plateau_steps: int = threshold(400, at_least=5 * BLOCK)
    """Steps without movement that are worth a word."""
    converged: float = 0.05
    """A loss below this is not stuck: it has arrived."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """At most one finding."""
        losses = finite(window.values("loss"))
        rise = find_rise(losses, stay=self.stay)
        if rise is not None:
            if not _is_changed_on_purpose(window, rise) and not is_surrogate(window, losses, rise):
                yield _of_rise(window, rise)
        elif (still := self._stillness(losses)) is not None:
            yield _of_plateau(window, losses, *still)

    def _stillness(self, losses: Points) -> tuple[float, float, float] | None:
        """(level, noise, movement) of a loss that did not move since it is remembered."""
        if len(losses) < self.plateau_steps:
            return None
        series = values(losses)
        blocks = [median(series[i : i + BLOCK]) for i in range(0, len(series) - BLOCK + 1, BLOCK)]
        level, noise = median(series), deviation(series)
        movement = slope([(float(i), block) for i, block in enumerate(blocks)]) * len(blocks)
        # Of a median of twenty values: 1.25 sigma / sqrt(20), a quarter of the noise.
        scatter = max(noise / 4, 1e-4 * abs(level))
        spread = max(blocks) - min(blocks)
        is_still = abs(movement) < scatter and abs(blocks[-1] - blocks[0]) < 4 * scatter and spread < 8 * scatter
        return (level, noise, movement) if is_still and abs(level) > self.converged else None


def _is_changed_on_purpose(window: Window, rise: Rise) -> bool:
    """Other tensors are trained since just that step: another loss is no fault."""
    near = range(rise.first_step - 2, rise.first_step + 3)
    return any(
        change.what in {"requires_grad", "new", "gone"} and change.step in near for change in window.models.changes
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
