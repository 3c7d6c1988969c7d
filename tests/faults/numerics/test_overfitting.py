"""Both losses part for several evaluations; scatter and divergence are silent."""

import random
from collections.abc import Callable

import pytest

from holter.faults.numerics.overfitting import Overfitting
from holter.faults.window import Spread, StepNumbers
from holter.records import Finding
from made_up import made_window


def judge(
    training: Callable[[int], float],
    evaluation: Callable[[int], float],
    *,
    name: str = "log.eval_loss",
    steps: int = 400,
) -> list[Finding]:
    def spread(value: float) -> Spread:
        return Spread(value, value, value, 0, 0, 1)

    series = tuple(
        StepNumbers(i, i, {"loss": spread(training(i))} | ({name: spread(evaluation(i))} if i % 20 == 19 else {}))
        for i in range(steps)
    )
    return list(Overfitting().judge(made_window(series=series)))


def learning(step: int) -> float:
    return 2.0 * 0.995**step


@pytest.mark.parametrize("name", ["log.eval_loss", "log.val/loss", "log.valid_loss", "log.test_loss"])
def test_the_best_evaluation_is_where_it_began(name: str) -> None:
    (finding,) = judge(learning, lambda i: 1.0 + abs(i - 199) / 200, name=name)
    assert (finding.first_step, finding.severity) == (199, "warning")
    assert finding.facts["series"] == ["loss", name]
    assert "from 1 to 2" in finding.summary
    assert finding.evidence[0].values["num_evaluations"] == 10


def test_what_rose_at_once_and_stays_up_is_named_though_it_rises_no_more() -> None:
    (finding,) = judge(learning, lambda i: 2.4 if i < 20 else 7.6 - i / 2000)
    assert finding.first_step == 19
    assert judge(learning, lambda i: 2.4 if i < 20 else 2.4 + 5 * 0.9 ** (i / 20)) == []


@pytest.mark.parametrize("seed", range(8))
def test_healthy_evaluations_are_silent(seed: int) -> None:
    noise = random.Random(seed)  # noqa: S311 - noise, no secret
    assert judge(learning, lambda i: learning(i) * noise.lognormvariate(0, 0.05)) == []
    assert judge(lambda _: 1.4 + noise.gauss(0, 0.1), lambda _: 1.4 + noise.gauss(0, 0.1)) == []
    assert judge(learning, lambda i: 1.0 + noise.gauss(0, 0.02) + (0.05 if i > 200 else 0)) == []
    assert judge(learning, lambda _: noise.lognormvariate(0, 0.5), steps=200) == []


def test_a_training_loss_that_rises_too_is_divergence() -> None:
    assert judge(lambda i: 1.0 + i / 400, lambda i: 1.0 + abs(i - 199) / 200) == []


def test_few_evaluations_and_other_names_are_silent() -> None:
    assert judge(learning, lambda i: 1.0 + abs(i - 59) / 20, steps=120) == []
    assert judge(learning, lambda i: 1.0 + abs(i - 199) / 200, name="log.value_loss") == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"overfitting\.min_evaluations must be at least 2, got 1"):
        Overfitting(min_evaluations=1)
