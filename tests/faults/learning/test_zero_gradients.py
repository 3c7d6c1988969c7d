"""Fires on gradients that are all exactly zero; quiet on a loss that is solved, on one rank's zeros, and where float16 may have made them."""

import math
from collections.abc import Sequence

from holter.diagnosis import top_cause
from holter.faults.learning.zero_gradients import ZeroGradients
from holter.faults.window import Note, Spread, StepNumbers
from holter.records import Finding, Inspection
from made_up import made_window


def judge(
    norms: Sequence[float], losses: Sequence[float], *, low: float | None = None, half: bool = False
) -> list[Finding]:
    series = tuple(
        StepNumbers(
            step,
            step,
            {
                "gradient_norm": Spread(norm, norm if low is None else low, norm, 0, 1, 2),
                "loss": Spread(loss, loss, loss, 0, 1, 2),
            },
        )
        for step, (norm, loss) in enumerate(zip(norms, losses, strict=True))
    )
    region = Inspection(reason="first", autocast_dtype="float16", witnesses=[], num_modules=1)
    notes = (Note(0, 2, 0, region),) if half else ()
    return list(ZeroGradients().judge(made_window(notes=notes, series=series)))


def test_zeros_from_the_first_step_on_are_found_within_eight_steps_and_explained() -> None:
    assert [] == judge([0.0] * 7, [2.0] * 7)
    (finding,) = judge([0.0] * 30, [2.0] * 30)
    assert (0, 7) == (finding.first_step, finding.detected_step)
    assert "exactly zero" in finding.evidence[0].summary
    assert "zero_gradients" == top_cause(finding)


def test_zeros_that_begin_later_are_found_whether_the_loss_is_floored_or_multiplied_by_zero() -> None:
    for flat in (0.0, 5.0):
        (finding,) = judge([1.0] * 25 + [0.0] * 20, [1.0] * 25 + [flat] * 20)
        assert (25, 40) == (finding.first_step, finding.detected_step)


def test_a_loss_that_is_solved_is_silent() -> None:
    losses = [1.0] * 10 + [0.1] * 20 + [0.0] * 30
    assert [] == judge([1.0] * 30 + [0.0] * 30, losses)
    # Some batches were solved before all were.
    assert [] == judge([1.0, 0.0] * 15 + [0.0] * 30, [1.0, 0.0] * 15 + [0.0] * 30)


def test_one_other_norm_is_enough_to_be_silent() -> None:
    assert [] == judge([0.0] * 29 + [1e-9], [2.0] * 30)
    assert [] == judge([1e-9] * 30, [2.0] * 30, low=0.0)


def test_zeros_that_float16_may_have_made_are_left_to_gradient_range() -> None:
    assert [] == judge([0.0] * 30, [1e-6] * 30, half=True)
    assert judge([0.0] * 30, [2.0] * 30, half=True)


def test_gradients_that_are_cleared_before_the_optimizer_gets_them_are_as_good_as_none() -> None:
    def judged(given: Sequence[float]) -> list[Finding]:
        numbers = {"gradient_norm": 1.0, "loss": 0.5}
        series = tuple(
            StepNumbers(
                step, step, {name: Spread(v, v, v, 0, 1, 2) for name, v in {**numbers, "norm.gradients": norm}.items()}
            )
            for step, norm in enumerate(given)
        )
        return list(ZeroGradients().judge(made_window(series=series)))

    (finding,) = judged([1.0] * 20 + [0.0] * 16)
    assert (20, "warning", "zero_gradients") == (finding.first_step, finding.severity, top_cause(finding))
    assert "what the optimizer was given" in finding.evidence[0].summary
    assert [] == judged([1.0] * 36)
    assert [] == judged([1.0, 0.0] * 18)


def test_the_finite_part_of_gradients_that_are_no_numbers_is_no_zero() -> None:
    no_number = Spread(math.nan, math.nan, math.nan, -1, -1, 2, 2)
    ruined = {"loss": no_number, "gradient_norm": no_number}
    fine = {"loss": Spread(0.5, 0.5, 0.5, 0, 1, 2), "gradient_norm": Spread(1.0, 1.0, 1.0, 0, 1, 2)}
    zero = Spread(0.0, 0.0, 0.0, 0, 1, 2)
    series = tuple(
        StepNumbers(
            step,
            step,
            {**fine, "norm.gradients": fine["gradient_norm"]} if step < 20 else {**ruined, "norm.gradients": zero},
        )
        for step in range(40)
    )
    assert [] == list(ZeroGradients().judge(made_window(series=series)))
