"""Names the step at which the learning rate jumped, if something came of it; schedules are silent."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from holter.faults.numerics.learning_rate import LearningRate
from holter.faults.window import Note, Spread, StepNumbers, StepView
from holter.records import Finding, ModuleVitals, Nonfinite, Vitals
from made_up import made_window


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - noise, no secret


def spread(value: float) -> Spread:
    is_finite = math.isfinite(value)
    return Spread(value if is_finite else math.nan, value, value, 0, 1, 2, 0 if is_finite else 2)


def judge(
    rates: Sequence[float],
    norms: Sequence[float],
    losses: Sequence[float],
    notes: tuple[Note, ...] = (),
    views: tuple[StepView, ...] = (),
) -> list[Finding]:
    series = tuple(
        StepNumbers(i, i, {"learning_rate": spread(a), "gradient_norm": spread(b), "loss": spread(c)})
        for i, (a, b, c) in enumerate(zip(rates, norms, losses, strict=True))
    )
    window = made_window(series=series, notes=notes, steps=views)
    return list(LearningRate().judge(window))


def calm(noise: random.Random, steps: int) -> tuple[list[float], list[float]]:
    return [noise.lognormvariate(0, 0.4) for _ in range(steps)], [1.4 + noise.gauss(0, 0.1) for _ in range(steps)]


JUMP = [1e-3] * 40 + [5e-2] * 20


@pytest.mark.parametrize("seed", range(8))
def test_a_jump_after_which_norm_and_loss_leave_their_history_is_named_at_its_step(seed: int) -> None:
    norms, losses = calm(dice(seed), 60)
    for i in range(41, 60):
        norms[i], losses[i] = norms[i] * 20, losses[i] + 0.3 * (i - 40)
    (finding,) = judge(JUMP, norms, losses)
    assert (finding.first_step, finding.severity, finding.ranks) == (40, "warning", (0, 1))
    assert finding.facts["has_jump"] is True
    assert finding.facts["has_loss_reaction"] is True
    assert finding.facts["series"] == ["learning_rate", "gradient_norm", "loss"]
    assert "from 0.001 to 0.05 at step 40, 50 times as much" in finding.summary
    assert finding.evidence[0].values == {"step": 40, "before": 1e-3, "after": 5e-2}


def test_it_is_known_three_steps_after_the_jump() -> None:
    norms, losses = calm(dice(1), 44)
    for i in range(41, 44):
        norms[i], losses[i] = norms[i] * 500, 40.0
    assert judge(JUMP[:43], norms[:43], losses[:43]) != [] or judge(JUMP[:44], norms, losses) != []


def test_a_jump_that_ends_in_nan_is_critical() -> None:
    norms, losses = calm(dice(2), 60)
    norms[41:], losses[41:] = [50.0, *[math.nan] * 18], [9.0, *[math.nan] * 18]
    (finding,) = judge(JUMP, norms, losses)
    assert (finding.first_step, finding.severity) == (40, "critical")


@pytest.mark.parametrize(("factor", "later", "is_told"), [(50.0, 0, True), (5.0, 0, False), (50.0, 3, False)])
def test_one_nan_at_once_after_a_tenfold_jump_is_the_jumps_for_a_halt_leaves_no_second(factor, later, is_told) -> None:
    norms, losses = calm(dice(2), 42 + later)
    norms[-1] = losses[-1] = math.nan
    found = judge([1e-3] * 40 + [1e-3 * factor] * (2 + later), norms, losses)
    assert is_told == bool(found)
    if found:
        assert (found[0].first_step, found[0].severity, found[0].facts["has_loss_reaction"]) == (40, "critical", True)


def test_a_batch_that_was_no_number_is_not_the_jumps() -> None:
    norms, losses = calm(dice(2), 42)
    norms[-1] = losses[-1] = math.nan
    bad = Nonfinite(where="input", name="x", nans=1, infs=0, numel=8)
    view = StepView(step=41, first_seen_ns=0, num_reported=2, missing=(), nonfinite=((0, bad),))
    assert judge([1e-3] * 40 + [3.0] * 2, norms, losses, views=(view,)) == []


def test_a_nan_out_of_ordinary_values_is_not_laid_to_a_jump_before_it() -> None:
    norms, losses = calm(dice(2), 60)
    norms[48:], losses[48:] = [math.nan] * 12, [math.nan] * 12
    assert judge(JUMP, norms, losses) == []


@pytest.mark.parametrize("seed", range(8))
def test_a_jump_that_leads_to_nothing_or_to_a_better_loss_is_silent(seed: int) -> None:
    norms, losses = calm(dice(seed), 60)
    assert judge(JUMP, norms, losses) == []
    faster = [loss * (0.93 ** max(0, i - 40)) for i, loss in enumerate(losses)]
    sharper = [norm * (4 if i > 40 else 1) for i, norm in enumerate(norms)]
    assert judge(JUMP, sharper, faster) == []


@pytest.mark.parametrize("seed", range(8))
def test_schedules_are_silent_whatever_spikes_there_are(seed: int) -> None:
    noise = dice(seed)
    norms, losses = calm(noise, 300)
    for i in noise.sample(range(300), 12):
        norms[i] *= 60
        losses[i] *= 5
    warm_up = [1e-3 * min(1, (i + 1) / 50) for i in range(300)]
    restarts = [1e-5 + 1e-3 * (1 + math.cos(math.pi * (i % 60) / 60)) / 2 for i in range(300)]
    plateau = [1e-2 * 0.1 ** (i // 100) for i in range(300)]
    from_zero = [0.0] * 20 + [1e-3] * 280
    for rates in (warm_up, restarts, plateau, from_zero):
        assert judge(rates, norms, losses) == []


def test_layers_unfrozen_with_a_higher_rate_change_the_norm_at_that_very_step_and_are_silent() -> None:
    norms, losses = calm(dice(4), 60)
    assert judge(JUMP, [norm * (15 if i >= 40 else 1) for i, norm in enumerate(norms)], losses) == []


def vitals(step: int, update_ratio: float) -> Note:
    modules = [ModuleVitals(name, "float32", 64, 1.0, 1.0, 0, 0, 1.0, update_ratio, 1.0, 0.1) for name in "abc"]
    return Note(0, step, step, Vitals(view="local", modules=modules, num_trainable=3))


def test_a_loss_that_rises_with_steps_as_large_as_the_weights_is_inferred() -> None:
    norms, losses = calm(dice(5), 100)
    losses = [loss + max(0, i - 50) for i, loss in enumerate(losses)]
    (finding,) = judge([0.1] * 100, norms, losses, tuple(vitals(i, 0.4) for i in range(0, 100, 10)))
    assert finding.facts["has_jump"] is False
    assert 50 <= finding.first_step <= 55
    assert any(e.kind == "update" and "100% of the modules" in e.summary for e in finding.evidence)
    assert judge([0.1] * 100, norms, losses, tuple(vitals(i, 0.001) for i in range(0, 100, 10))) == []


def test_a_loss_that_grows_a_thousandfold_from_the_first_step_on_is_named_before_it_is_nan() -> None:
    losses = [2.0 * 10**step for step in range(12)]
    series = tuple(
        StepNumbers(step, step, {"loss": spread(loss), "learning_rate": spread(1.5)})
        for step, loss in enumerate(losses)
    )
    window = made_window(
        series=series,
        notes=tuple(vitals(step, 4.0) for step in range(12)),
    )
    (finding,) = LearningRate().judge(window)
    assert finding.severity == "critical"
    assert finding.first_step <= 4
    calm_window = replace(window, notes=tuple(vitals(step, 0.01) for step in range(12)))
    assert list(LearningRate().judge(calm_window)) == []
    short = replace(window, series=series[:6])
    assert list(LearningRate().judge(short)) == []


def test_a_loss_that_the_first_steps_left_worse_than_it_was_is_named_after_sixteen() -> None:
    losses = [1.4, 1.2, 2.5, 4.9, 5.1, 3.6, *([2.6, 2.4, 2.7] * 6)]
    large = tuple(vitals(step, 0.4) for step in range(8))
    (finding,) = judge([5.0] * 24, [0.5] * 24, losses, large)
    assert ("warning", 0, False) == (finding.severity, finding.first_step, finding.facts["has_jump"])
    assert judge([5.0] * 14, [0.5] * 14, losses[:14], large) == []
    assert judge([5.0] * 24, [0.5] * 24, losses, tuple(vitals(step, 0.01) for step in range(8))) == []
    assert judge([5.0] * 24, [0.5] * 24, [1.4, 1.9, 1.6, *[1.0] * 21], large) == []


def test_a_loss_that_came_back_to_chance_and_no_further_is_named_whenever_it_is_looked_at() -> None:
    losses = [1.7, 6.6, *([4.4, 6.0, 3.6] * 8), *([1.65, 1.7, 1.6] * 30)]
    large = tuple(vitals(step, 0.4) for step in range(8))
    (finding,) = judge([0.5] * len(losses), [0.5] * len(losses), losses, large)
    assert (0, False) == (finding.first_step, finding.facts["has_jump"])
    better = [*losses[:60], *[1.2] * 40]
    assert judge([0.5] * 100, [0.5] * 100, better, large) == []


def test_a_loss_that_blew_up_at_first_and_learned_nothing_since_is_named() -> None:
    losses = [2.36, 49.0, 16.9, 3.4, 2.4, 14.2, 4.7, 3.5, 2.5, 3.5, 3.1, *([2.4, 2.3, 2.45] * 8)]
    large = tuple(vitals(step, 0.4) for step in range(8))
    (finding,) = judge([1.0] * len(losses), [0.5] * len(losses), losses, large)
    assert 0 == finding.first_step
    learned = [*losses[:11], *[2.2 - 0.02 * i for i in range(24)]]
    assert judge([1.0] * len(learned), [0.5] * len(learned), learned, large) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"learning_rate\.factor must be above 1, got 1"):
        LearningRate(factor=1)
