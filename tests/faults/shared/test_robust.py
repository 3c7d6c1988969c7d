"""Robust statistics: one spike neither alarms nor hides an alarm."""

import math
import random

import pytest

from holter.faults.shared.robust import deviation, find_rise, finite, levels, log_score, score, slope
from holter.faults.window import Spread


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - noise, no secret


def test_the_deviation_of_noise_is_its_own_whatever_single_values_do() -> None:
    noise = dice(3)
    values = [noise.gauss(0, 2) for _ in range(2000)]
    # 2000 values: the standard error of the scaled MAD is 1.17 sigma / sqrt(2000) = 0.05.
    assert deviation(values) == pytest.approx(2, abs=0.2)
    assert deviation([*values, 1e9, 1e9]) == pytest.approx(deviation(values), rel=0.01)


def test_scores_count_deviations_above_the_median() -> None:
    history = [8.0, 9.0, 10.0, 11.0, 12.0]
    assert score(10, history) == 0
    assert score(10 + 1.4826 * 3, history) == pytest.approx(3)
    assert log_score(math.e, [1.0] * 5) == pytest.approx(10)
    assert log_score(math.inf, [1.0] * 5) == math.inf


def test_a_constant_history_has_no_infinite_scores() -> None:
    assert score(1.01, [1.0] * 9) < 1


def test_only_numbers_that_were_finite_on_every_rank_count() -> None:
    sound, odd = Spread(2.0, 1.0, 3.0, 0, 1, 2), Spread(2.0, 2.0, 2.0, 0, 0, 2, num_nonfinite=1)
    assert finite([(4, sound), (5, odd)]) == [(4, 2.0)]


def test_a_level_is_what_a_series_keeps_to() -> None:
    assert levels([1, 1, 50, 1, 1, 1]) == [1, 1]


def test_the_slope_is_not_that_of_its_outliers() -> None:
    assert slope([(float(i), 2.0 * i) for i in range(50)] + [(50.0, -1e6)]) == pytest.approx(2, rel=0.05)


def falling(noise: random.Random, steps: int, floor: float = 0.5) -> list[float]:
    return [floor + 2 * math.exp(-i / 30) + abs(noise.gauss(0, 0.1)) for i in range(steps)]


@pytest.mark.parametrize("seed", range(8))
def test_a_rise_that_stays_is_dated(seed: int) -> None:
    noise = dice(seed)
    series = falling(noise, 100) + [5 + noise.gauss(0, 0.5) for _ in range(40)]
    rise = find_rise(list(enumerate(series)))
    assert rise is not None
    assert rise.first_step == 100
    assert rise.now == pytest.approx(5, abs=0.5)


@pytest.mark.parametrize("seed", range(8))
def test_noise_spikes_and_a_rise_that_comes_back_are_none(seed: int) -> None:
    noise = dice(seed)
    spiky = [value * (40 if noise.random() < 0.03 else 1) for value in falling(noise, 300)]
    bump = falling(noise, 100) + [5 * math.exp(-i / 20) + 0.5 for i in range(100)]
    scatter = [noise.lognormvariate(0, 0.8) for _ in range(200)]
    near_zero = [10 ** (-i / 25) for i in range(120)] + [0.01] * 60
    for series in (spiky, bump, scatter, near_zero):
        for end in range(51, len(series), 10):
            assert find_rise(list(enumerate(series[:end]))) is None


def test_a_climb_is_a_rise_before_it_has_doubled_and_a_plateau_above_is_not() -> None:
    fall = [(step, 5.6 - 0.07 * step) for step in range(40)]
    climb = [(step, 2.8 + 0.045 * (step - 40)) for step in range(40, 100)]
    found = find_rise([*fall, *climb])
    assert found is not None
    assert 40 <= found.first_step <= 60
    assert find_rise([*fall, *((step, 4.4) for step in range(40, 100))]) is None
    assert find_rise([*fall, *((step, 2.8 + 0.005 * (step - 40)) for step in range(40, 100))]) is None
