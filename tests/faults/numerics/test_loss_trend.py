"""A loss that rises and stays; one that never moved, as information only."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from holter.diagnosis import rank_causes
from holter.faults.numerics.loss_trend import LossTrend
from holter.faults.window import CensusChange, Note, Spread, StepNumbers
from holter.records import Finding, Labels
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


def test_a_harder_stage_that_jumps_and_comes_to_rest_where_the_first_began_is_no_divergence() -> None:
    stage = [2.4 + 4 * math.exp(-i / 15) for i in range(90)]
    assert [] == judge([*falling(1, 120), *stage])


def test_a_loss_a_thousand_times_as_high_is_critical() -> None:
    (finding,) = judge([*falling(1, 120), *(10.0**i for i in range(3, 38))])
    assert finding.severity == "critical"


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_whose_sign_turns_and_that_grows_is_driven_up(seed: int) -> None:
    before = falling(seed, 60)
    (finding,) = judge([*before, *(-before[-1] - 0.2 * i for i in range(20))])
    assert (finding.first_step, finding.facts["is_rising"]) == (60, True)
    assert "loss_divergence" == rank_causes(finding)[0].cause


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_that_goes_below_zero_by_small_steps_is_learning(seed: int) -> None:
    noise = dice(seed)
    assert judge([1.0 - 0.03 * i + noise.gauss(0, 0.05) for i in range(120)]) == [], "the likelihood of a density"
    assert judge([*falling(seed, 60), *(-0.5 + noise.gauss(0, 0.05) for _ in range(60))]) == [], "another loss"


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


def with_terms(terms: Sequence[dict[str, float]]) -> list[Finding]:
    series = tuple(
        StepNumbers(
            step,
            step,
            {"loss": Spread(sum(each.values()), 0, 0, 0, 1, 2)}
            | {f"log.loss_terms.{name}": Spread(value, value, value, 0, 1, 2) for name, value in each.items()},
        )
        for step, each in enumerate(terms)
    )
    return list(LossTrend().judge(made_window(series=series)))


@pytest.mark.parametrize(("restored", "num"), [(-0.3, 0), (+0.3, 1)], ids=["still_falls", "rises_too"])
def test_a_codebook_that_grows_while_its_decoder_learns_is_no_divergence(restored: float, num: int) -> None:
    noise = dice(4)
    terms = [
        {
            "restore": 1.0 + restored * step / 300 + noise.gauss(0, 0.01),
            "codebook": 0.2 + (1.3 * (step - 60) / 240 if step > 60 else 0.0) + noise.gauss(0, 0.01),
        }
        for step in range(300)
    ]
    assert num == len(with_terms(terms))


def guessing(losses: Sequence[float], *, rate: Sequence[float] | None = None, **labels: Any) -> list[Finding]:
    rates = rate or [1e-3] * len(losses)
    series = tuple(
        StepNumbers(
            i, i, {"loss": Spread(v, v, v, 0, 1, 2), "learning_rate": Spread(rates[i], rates[i], rates[i], 0, 1, 2)}
        )
        for i, v in enumerate(losses)
    )
    known = {"counts": {}, "num_classes": 64, "is_weighted": False, "first_step": 0} | labels
    return list(LossTrend().judge(made_window(series=series, notes=(Note(0, 12, 0, Labels(**known)),))))


def test_a_loss_of_guessing_is_told_after_a_hundred_and_fifty_steps() -> None:
    noise = dice(2)
    losses = [4.2 + 0.1 * 0.97**i + noise.gauss(0, 0.05) for i in range(170)]
    (finding,) = guessing(losses)
    assert ("info", 0) == (finding.severity, finding.first_step)
    assert "loss_plateau" == rank_causes(finding)[0].cause
    assert [] == guessing(losses[:140])
    assert [] == guessing(losses, rate=[1e-5 * i for i in range(170)])
    assert [] == guessing(losses, is_weighted=True)


def test_the_loss_of_guessing_follows_the_labels_frequencies() -> None:
    noise = dice(3)
    counts = {0: 900, 1: 100}
    entropy = 0.325
    assert [] == guessing([0.2 + noise.gauss(0, 0.02) for _ in range(170)], num_classes=2, counts=counts)
    (finding,) = guessing([entropy + 0.01 + noise.gauss(0, 0.005) for _ in range(170)], num_classes=2, counts=counts)
    assert finding.evidence[0].values["guessing"] == pytest.approx(entropy, abs=1e-3)


def test_what_is_learned_slowly_is_not_guessing() -> None:
    noise = dice(5)
    assert [] == guessing([4.2 - 0.002 * i + noise.gauss(0, 0.05) for i in range(170)])
