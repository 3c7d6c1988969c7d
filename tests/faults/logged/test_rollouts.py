"""What generates against what trains, and runs that learn nothing: each fault, and the healthy thing that looks most like it."""

from typing import Any

import pytest

from holter.diagnosis import rank_causes, top_cause
from holter.faults.logged.learning_signal import LearningSignal
from holter.faults.logged.rollout_weights import RolloutWeights
from holter.faults.window import Note, Spread, StepNumbers, Window
from holter.records import Finding, Rollout
from holter.records.rank import Named
from made_up import made_window

ALL = 20


def rollout(*, equal: int = ALL, moved: int = ALL, behind: int = 0, **named: tuple[str, ...]) -> Rollout:
    return Rollout(
        num_equal=equal,
        num_moved=moved,
        behind=behind,
        **{name: Named(len(names), list(names)) for name, names in named.items()},
    )


def judge(*told: Rollout, rank: int = 0) -> list[Finding]:
    return list(
        RolloutWeights().judge(made_window(notes=tuple(Note(rank, step, 0, one) for step, one in enumerate(told))))
    )


NAMES = tuple(f"layers.{number}.weight" for number in range(ALL))
ADAPTERS = ("layers.0.lora_A.weight", "layers.0.lora_B.weight")


@pytest.mark.parametrize(
    "told",
    [
        (rollout(), rollout(equal=15, stale=NAMES[:5], behind=1), rollout(equal=15, stale=NAMES[:5], behind=2)),
        (rollout(), rollout(equal=15, other=NAMES[:5]), rollout(equal=15, other=NAMES[:5])),
        (rollout(missing=("head.weight",)),) * 2,
        (rollout(missing=ADAPTERS),) * 2,
        (
            rollout(),
            rollout(equal=0, stale=NAMES, behind=1),
            rollout(equal=0, stale=NAMES, behind=2),
            rollout(equal=0, stale=NAMES, behind=3),
        ),
        (rollout(equal=0, other=NAMES),) * 3,
    ],
)
def test_weights_that_are_not_those_that_train(told: tuple[Rollout, ...]) -> None:
    (finding,) = judge(*told)
    assert ("stale_rollout_weights", "warning", (0,)) == (top_cause(finding), finding.severity, finding.ranks)
    assert "observation" == rank_causes(finding)[0].basis
    assert finding.tensors


@pytest.mark.parametrize(
    "told",
    [
        (rollout(),) * 5,
        (rollout(), *(rollout(equal=0, stale=NAMES, behind=1),) * 6),
        (rollout(), rollout(equal=15, stale=NAMES[:5], behind=1), rollout()),
        (rollout(equal=18, missing=ADAPTERS, other=NAMES[:1]),) * 4,
        (rollout(equal=15, moved=0, other=NAMES[:5]),) * 2,
    ],
)
def test_samplers_that_are_well(told: tuple[Rollout, ...]) -> None:
    assert [] == judge(*told)


def test_another_dtype_is_information() -> None:
    (finding,) = judge(*(rollout(equal=0, cast=NAMES),) * 3)
    assert "info" == finding.severity


def logs(*steps: dict[str, float], norm: float = 0.0) -> Window:
    numbers = [{f"log.{name}": value for name, value in step.items()} | {"gradient_norm": norm} for step in steps]
    series = tuple(
        StepNumbers(place, place, {name: Spread(value, value, value, 0, 0, 2) for name, value in step.items()})
        for place, step in enumerate(numbers)
    )
    return made_window(series=series)


FLAT: dict[str, Any] = {
    "reward": 1.0,
    "reward_std": 0.0,
    "frac_reward_zero_std": 1.0,
    "completions/clipped_ratio": 0.5,
    "completions/max_length": 60.0,
}
VARIED = FLAT | {"reward_std": 0.3, "frac_reward_zero_std": 0.0}
CUT, EMPTY = {"completions/clipped_ratio": 1.0}, {"completions/max_length": 1.0}


@pytest.mark.parametrize(
    ("step", "norm", "is_fault"),
    [
        (FLAT, 0.0, True), (FLAT | CUT, 0.1, True), (VARIED | CUT, 0.0, True), (FLAT | EMPTY, 0.1, True), (VARIED | EMPTY, 0.0, True),
        (FLAT, 0.1, False), (VARIED, 0.1, False), (VARIED | CUT, 0.1, False), (VARIED, 0.0, False),
        (FLAT | {"frac_reward_zero_std": 0.5}, 0.0, False),
    ],
)  # fmt: skip
def test_nothing_to_learn_within_three_logs(step: dict[str, float], norm: float, is_fault: bool) -> None:  # noqa: FBT001
    found = list(LearningSignal().judge(logs(step, step, step, norm=norm)))
    assert is_fault == bool(found)
    if found:
        assert ("no_learning_signal", 0, 2) == (top_cause(found[0]), found[0].first_step, found[0].detected_step)


def test_one_log_with_a_signal_and_two_without_are_nothing() -> None:
    assert [] == list(LearningSignal().judge(logs(FLAT, VARIED, FLAT, FLAT)))
    assert [] == list(LearningSignal().judge(logs(FLAT, FLAT, FLAT, VARIED)))
    assert [] == list(LearningSignal().judge(made_window()))
