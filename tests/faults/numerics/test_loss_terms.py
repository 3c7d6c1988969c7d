"""One term outweighs the others, or is gone; weights on a schedule are silent."""

import random
from collections.abc import Callable

import pytest

from holter.faults.numerics.loss_terms import LossTerms
from holter.faults.window import Spread, StepNumbers
from holter.records import Finding
from made_up import made_window


def judge(num: int = 60, **terms: Callable[[int], float]) -> list[Finding]:
    def spread(value: float) -> Spread:
        return Spread(value, value, value, 0, 0, 1)

    series = tuple(
        StepNumbers(i, i, {f"log.loss_terms.{name}": spread(term(i)) for name, term in terms.items()})
        for i in range(num)
    )
    return list(LossTerms().judge(made_window(series=series)))


def test_a_term_of_a_hundred_times_the_others_is_named() -> None:
    (finding,) = judge(reconstruction=lambda _: 900.0, kl=lambda _: -1.0, commit=lambda _: 0.5)
    assert finding.severity == "warning"
    assert "'reconstruction' is 600 times all the others together" in finding.summary
    assert finding.facts["is_dominating"] is True
    assert finding.facts["series"] == [f"log.loss_terms.{name}" for name in ("commit", "kl", "reconstruction")]
    assert finding.evidence[0].values["kl"] == 1.0


def test_a_term_that_is_gone_is_dated_and_one_that_never_was_is_named() -> None:
    (gone,) = judge(a=lambda _: 1.0, b=lambda i: 0.5 if i < 30 else 0.0)
    assert gone.first_step == 30
    assert gone.facts["is_zero_from_start"] is False
    (never,) = judge(a=lambda _: 1.0, b=lambda _: 0.0)
    assert never.facts["is_zero_from_start"] is True


def test_a_term_whose_weight_was_changed_is_named_and_dated() -> None:
    (finding,) = judge(
        task=lambda i: 1 + 0.1 * (i % 3), adversarial=lambda i: (0.03 if i < 40 else 60.0) * (1 + 0.2 * (i % 2))
    )
    assert ("warning", 40) == (finding.severity, finding.first_step)
    assert "'adversarial' went from" in finding.summary
    assert [] == judge(task=lambda _: 1.0, adversarial=lambda i: 60.0 if i == 40 else 0.03), "a spike that comes back"
    assert [] == judge(task=lambda i: 1.0 if i < 40 else 90.0, adversarial=lambda i: 0.03 if i < 40 else 3.0), (
        "all grew"
    )


@pytest.mark.parametrize("seed", range(8))
def test_schedules_and_scatter_are_silent(seed: int) -> None:
    noise = random.Random(seed)  # noqa: S311 - noise, no secret

    def usual(_: int) -> float:
        return noise.lognormvariate(0, 1)

    cases: list[Callable[[int], float]] = [
        lambda i: 0.0 if i < 30 else 0.3,
        lambda i: 0.0005 * (i + 1),
        lambda i: max(0.0, 1 - i / 30),
        lambda _: 0.0 if noise.random() < 0.5 else 0.4,
        lambda _: noise.lognormvariate(-3, 1),
    ]
    for case in cases:
        for num in (25, 45, 60, 200):
            assert judge(num, a=usual, b=case) == []


def test_a_small_penalty_and_a_task_that_was_learned_are_silent() -> None:
    assert judge(task=lambda _: 1.4, l2=lambda _: 0.008) == []
    assert judge(task=lambda i: 1.4 * 0.8**i + 1e-4, commit=lambda _: 0.3) == []
    assert judge(task=lambda _: 1.4, commit=lambda i: 0.3 if i < 30 else 3000.0)


def test_one_term_alone_and_few_logs_are_silent() -> None:
    assert judge(a=lambda _: 900.0) == []
    assert judge(15, a=lambda _: 900.0, b=lambda _: 0.1) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"loss_terms\.min_logs must be at least 3, got 1"):
        LossTerms(min_logs=1)


def test_a_term_that_jumps_is_named_and_a_value_loss_whose_policy_finds_its_first_reward_is_not() -> None:
    def jumps(step: int) -> float:
        return 5.0 if step >= 40 else 0.01

    (finding,) = judge(task=lambda _: 0.2, consistency=jumps)
    assert 40 == finding.first_step
    assert [] == judge(policy_loss=lambda step: 0.01 * (-1) ** step, value_loss=jumps)
    assert judge(policy_loss=lambda step: 0.01 * (-1) ** step, kl=jumps)
