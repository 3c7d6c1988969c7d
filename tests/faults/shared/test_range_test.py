"""A range test of the learning rate raises no alarm while it lasts; what comes after it, and warm-ups, are judged as ever."""

import math
from collections.abc import Sequence

import pytest

from holter.faults.numerics.gradient_explosion import GradientExplosion
from holter.faults.numerics.learning_rate import LearningRate
from holter.faults.numerics.loss_trend import LossTrend
from holter.faults.numerics.nonfinite_loss import NonfiniteLoss
from holter.faults.shared.range_test import range_test
from holter.faults.window import Note, Spread, StepNumbers, Window
from holter.records import Finding, ModuleVitals, Vitals
from made_up import made_window

FACTOR = [1e-7 * 1.26**i for i in range(70)]
EQUAL = [1e-7 + 0.8 * i / 69 for i in range(70)]
WARM_UP = [0.8 * (i + 1) / 2000 for i in range(2000)]


def spread(value: float) -> Spread:
    is_finite = math.isfinite(value)
    return Spread(value if is_finite else math.nan, value, value, 0, 1, 2, 0 if is_finite else 2)


def window_of(rates: Sequence[float], norms: Sequence[float], losses: Sequence[float]) -> Window:
    series = tuple(
        StepNumbers(i, i, {"learning_rate": spread(a), "gradient_norm": spread(b), "loss": spread(c)})
        for i, (a, b, c) in enumerate(zip(rates, norms, losses, strict=True))
    )
    large = ModuleVitals("block", "float32", 64, 1.0, 1.0, 0, 0, 1.0, 0.5, 1.0, 0.1)
    notes = tuple(
        Note(0, i, i, Vitals(view="local", modules=[large], num_trainable=1)) for i in range(0, len(rates), 5)
    )
    return made_window(series=series, notes=notes)


def found(window: Window) -> list[Finding]:
    detectors = (GradientExplosion(), LearningRate(), LossTrend(), NonfiniteLoss())
    return [finding for detector in detectors for finding in detector.judge(window)]


def breaking(num: int, at: int, *, is_lost: bool = False) -> tuple[list[float], list[float]]:
    """Norms and losses that break at a step and go up from there."""
    norms = [1.0 + 0.05 * (i % 7) + 3.0 ** max(0, i - at) - 1 for i in range(num)]
    losses = [2.0 + 0.02 * (i % 5) + 10.0 ** min(12, max(0, i - at)) - 1 for i in range(num)]
    return norms, [math.nan if is_lost and i > at + 5 else loss for i, loss in enumerate(losses)]


@pytest.mark.parametrize("rates", [FACTOR, EQUAL], ids=["by a factor", "by equal steps"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["large", "NaN"])
@pytest.mark.parametrize("num_after", [0, 5, 60], ids=["at its end", "just after", "long after"])
def test_what_a_range_test_brings_about_is_information(rates: list[float], num_after: int, *, is_lost: bool) -> None:
    norms, losses = breaking(70, 55, is_lost=is_lost)
    window = window_of(
        rates + [1e-3] * num_after,
        norms + [1.0 + 0.05 * (i % 7) for i in range(num_after)],
        losses + [2.0 + 0.02 * (i % 5) for i in range(num_after)],
    )
    told = found(window)
    assert told
    assert {finding.severity for finding in told} == {"info"}
    assert all("range test" in finding.summary and finding.evidence[-1].values["first_step"] == 0 for finding in told)


def test_a_loss_that_breaks_after_the_test_is_judged_without_it() -> None:
    norms, losses = breaking(70, 55)
    later_norms, later_losses = breaking(80, 60)
    window = window_of(FACTOR + [1e-3] * 80, norms + later_norms, losses + later_losses)
    (explosion,) = GradientExplosion().judge(window)
    assert explosion.severity == "critical"
    assert 125 < explosion.first_step < 140


def test_a_warm_up_by_equal_steps_is_no_range_test() -> None:
    norms, losses = breaking(2000, 1975)
    window = window_of(WARM_UP, norms, losses)
    assert range_test(window) is None
    assert {finding.severity for finding in found(window)} == {"critical"}


@pytest.mark.parametrize(
    "rates",
    [
        [1e-3 * math.cos(i / 200) for i in range(300)],
        [1e-3 * 0.9**i for i in range(200)],
        [1e-3] * 200,
        [1e-6] * 50 + [1e-1] * 50,
        FACTOR[:25],
    ],
    ids=["cosine", "decay", "constant", "a jump", "two decades"],
)
def test_other_schedules_are_no_range_test(rates: list[float]) -> None:
    assert range_test(window_of(rates, [1.0] * len(rates), [1.0] * len(rates))) is None


def test_rates_may_be_held_for_some_steps_each() -> None:
    rates = [1e-7 * 2.0 ** (step // 5) for step in range(120)]
    test = range_test(window_of(rates, [1.0] * 120, [1.0] * 120))
    assert test is not None
    assert (0, 115) == (test.first_step, test.last_step)
    # Five levels are a staircase, no test.
    stairs = [1e-5 * 10.0 ** (step // 20) for step in range(100)]
    assert range_test(window_of(stairs, [1.0] * 100, [1.0] * 100)) is None
