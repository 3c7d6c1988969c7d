"""The loss that is shown is the one that the script means."""

import pytest

from holter.cli.status import _loss
from holter.records import StepDone
from holter.sidecar.state import loss_text


def done(micro_steps: int, **numbers: float) -> StepDone:
    return StepDone(
        seconds=1.0,
        phase_seconds={},
        micro_steps=micro_steps,
        loss=0.5,
        gradient_norm=None,
        learning_rate=None,
        batch=0,
        roots={},
        nonfinite=[],
        overhead_ratio=0.0,
        check_interval=1,
        numbers=numbers,
    )


@pytest.mark.parametrize(
    ("micro_steps", "is_divided", "expected"), [(1, 1.0, 1), (4, 1.0, 4), (4, 0.0, 1), (1, 0.0, 1)]
)
def test_only_a_loss_that_is_divided_over_several_passes_is_put_together(
    micro_steps: int, is_divided: float, expected: int
) -> None:
    assert expected == done(micro_steps, **{"loss.is_divided": is_divided}).num_divided


def test_both_are_named() -> None:
    assert "loss 2 (0.5 in each of 4 backward passes)" == loss_text(0.5, 4)
    assert "loss 0.5" == loss_text(0.5, 1)
    assert ("2 (0.5 x 4)", "0.5", "NaN") == (_loss(0.5, 4), _loss(0.5, 1), _loss(float("nan"), 4))
