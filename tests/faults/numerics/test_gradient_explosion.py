"""Fires when the norm leaves its history and stays; scatter, spikes, shrinking norms and unfrozen layers are silent."""

import math
import random
from collections.abc import Sequence

import pytest

from holter.faults.numerics.gradient_explosion import GradientExplosion
from holter.faults.window import CensusChange, Note, Spread, StepNumbers
from holter.records import Finding, ModuleVitals, Vitals
from made_up import made_window


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - noise, no secret


def spread(value: float) -> Spread:
    is_finite = math.isfinite(value)
    return Spread(value if is_finite else math.nan, value, value, 0, 1, 2, 0 if is_finite else 2)


def judge(
    norms: Sequence[float],
    losses: Sequence[float] | None = None,
    *,
    micro_steps: Sequence[float] | None = None,
    changes: tuple[CensusChange, ...] = (),
    notes: tuple[Note, ...] = (),
) -> list[Finding]:
    losses = losses or [1.4] * len(norms)
    counts = micro_steps or [1.0] * len(norms)
    series = tuple(
        StepNumbers(i, i, {"gradient_norm": spread(a), "loss": spread(b), "micro_steps": spread(c)})
        for i, (a, b, c) in enumerate(zip(norms, losses, counts, strict=True))
    )
    window = made_window(series=series, changes=changes, notes=notes)
    return list(GradientExplosion().judge(window))


def scatter(seed: int, steps: int) -> list[float]:
    noise = dice(seed)
    return [noise.lognormvariate(0, 0.5) for _ in range(steps)]


@pytest.mark.parametrize("seed", range(8))
def test_a_norm_that_grows_and_stays_is_dated_and_its_modules_are_named(seed: int) -> None:
    norms = [norm * (2.5 ** max(0, i - 60)) for i, norm in enumerate(scatter(seed, 80))]
    losses = [1.4 + 0.5 * max(0, i - 62) for i in range(80)]

    def vitals(step: int) -> Note:
        sizes = {"encoder": 1.0, "block": 1e3 if step > 60 else 1.0}
        modules = [ModuleVitals(n, "float32", 64, 1.0, g, 0, 0, 1.0, 0.01, 1.0, 0.1) for n, g in sizes.items()]
        return Note(0, step, step, Vitals(view="local", modules=modules, num_trainable=2))

    (finding,) = judge(norms, losses, notes=tuple(vitals(i) for i in range(0, 80, 5)))
    assert 60 < finding.first_step <= 70
    assert finding.severity == "warning"
    assert finding.modules == ("block",)
    assert finding.facts["has_loss_reaction"] is True
    assert finding.facts["series"][0] == "gradient_norm"
    assert "robust deviations above" in finding.evidence[0].summary


def test_a_hundred_times_the_norm_needs_no_loss() -> None:
    (finding,) = judge([*scatter(1, 60), *(300 * norm for norm in scatter(2, 10))])
    assert 60 <= finding.first_step <= 62
    assert finding.facts["has_loss_reaction"] is False


@pytest.mark.parametrize("seed", range(8))
def test_healthy_norms_are_silent(seed: int) -> None:
    noise = dice(seed)
    wild = [noise.lognormvariate(0, 1.1) for _ in range(400)]
    spikes = [norm * (200 if noise.random() < 0.03 else 1) for norm in scatter(seed, 400)]
    shrinking = [norm * max(1e-5, 0.95**i) * (50 if 250 < i < 280 else 1) for i, norm in enumerate(scatter(seed, 400))]
    for norms in (wild, spikes, shrinking):
        for end in (30, 60, 200, 400):
            assert judge(norms[:end]) == []


def test_a_spike_of_four_steps_comes_back() -> None:
    norms = scatter(3, 100)
    norms[50:54] = [400.0] * 4
    assert judge(norms) == []


def test_layers_unfrozen_raise_the_norm_and_not_the_loss() -> None:
    assert judge([norm * (15 if i >= 50 else 1) for i, norm in enumerate(scatter(4, 100))]) == []
    changed = (CensusChange(0, 50, "a.weight", "requires_grad", "False", "True"),)
    assert judge([norm * (500 if i >= 50 else 1) for i, norm in enumerate(scatter(4, 100))], changes=changed) == []


def test_more_micro_batches_have_another_norm() -> None:
    norms = [norm * (200 if i >= 50 else 1) for i, norm in enumerate(scatter(5, 100))]
    assert judge(norms, micro_steps=[1.0] * 50 + [128.0] * 50) == []


def test_the_first_steps_are_not_judged() -> None:
    assert judge([*scatter(6, 10), *([1000.0] * 20), *scatter(6, 20)]) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"gradient_explosion\.min_history must be at least 8, got 1"):
        GradientExplosion(min_history=1)
