"""A loss that rises and stays; one that never moved, as information only."""

import math
import random
from collections.abc import Sequence

import pytest

from holter.faults.numerics.loss_trend import LossTrend
from holter.faults.window import CensusChange, Spread, StepNumbers
from holter.records import Finding
from made_up import made_window


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - noise, no secret


def judge(losses: Sequence[float], changes: tuple[CensusChange, ...] = ()) -> list[Finding]:
    series = tuple(StepNumbers(i, i, {"loss": Spread(v, v, v, 0, 1, 2)}) for i, v in enumerate(losses))
    window = made_window(series=series, changes=changes)
    return list(LossTrend().judge(window))


def falling(seed: int, steps: int) -> list[float]:
    noise = dice(seed)
    return [0.5 + 2 * math.exp(-i / 40) + noise.gauss(0, 0.05) for i in range(steps)]


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_that_rises_and_stays_is_dated(seed: int) -> None:
    (finding,) = judge([*falling(seed, 120), *([6.0] * 35)])
    assert (finding.first_step, finding.severity) == (120, "warning")
    assert finding.facts["is_rising"] is True
    assert finding.facts["series"] == ["loss", "learning_rate", "gradient_norm"]
    assert finding.evidence[0].values["num_steps"] == 35


def test_a_loss_a_thousand_times_as_high_is_critical() -> None:
    (finding,) = judge([*falling(1, 120), *(10.0**i for i in range(3, 38))])
    assert finding.severity == "critical"


def test_a_rise_is_not_named_before_it_has_lasted() -> None:
    assert judge([*falling(1, 120), *([6.0] * 25)]) == []


def test_other_layers_trained_since_just_then_have_another_loss() -> None:
    changes = (CensusChange(0, 120, "b.weight", "new", "", "(4, 4)"),)
    assert judge([*falling(1, 120), *([6.0] * 35)], changes) == []


@pytest.mark.parametrize("seed", range(8))
def test_healthy_losses_are_silent(seed: int) -> None:
    noise = dice(seed)
    restarts = [v + 0.4 * (1 - (i % 60) / 60) for i, v in enumerate(falling(seed, 240))]
    spiky = [v * (20 if noise.random() < 0.02 else 1) for v in falling(seed, 300)]
    small_batches = [noise.lognormvariate(0, 0.9) for _ in range(300)]
    bouncing = [max(1e-4, 1.4 * 0.93**i) * noise.lognormvariate(0, 1) * (300 if i > 150 else 1) for i in range(200)]
    for losses in (restarts, spiky, small_batches, bouncing):
        for end in (40, 60, 130, len(losses)):
            assert [f for f in judge(losses[:end]) if f.severity != "info"] == []


def test_a_loss_that_never_moved_is_an_information() -> None:
    noise = dice(9)
    still = [1.386 + noise.gauss(0, 0.05) for _ in range(500)]
    (finding,) = judge(still)
    assert (finding.severity, finding.first_step) == ("info", 0)
    assert finding.facts["is_still"] is True
    assert judge(still[:300]) == []


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_that_falls_slowly_or_has_arrived_is_no_plateau(seed: int) -> None:
    noise = dice(seed)
    assert judge([2.0 - 0.001 * i + noise.gauss(0, 0.1) for i in range(500)]) == []
    assert judge([0.001 + abs(noise.gauss(0, 0.0001)) for _ in range(500)]) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"loss_trend\.plateau_steps must be at least 100, got 3"):
        LossTrend(plateau_steps=3)
