"""Fires on a raw NaN that the logger hides; a NaN that was applied is another detector's."""

import math

import pytest

from holter.faults import StepView
from holter.faults.numerics.nonfinite_loss import NonfiniteLoss
from holter.faults.window import Spread, StepNumbers
from holter.records import Finding, Nonfinite, Origin
from made_up import made_window


def spread(value: float, *, num_nonfinite: int = 0) -> Spread:
    return Spread(value, value, value, 0, 1, 2, num_nonfinite)


NAN = spread(math.nan, num_nonfinite=2)


def judge(losses: list[Spread], logged: dict[int, float] | None = None, *views: StepView) -> list[Finding]:
    series = []
    for step, loss in enumerate(losses):
        numbers = {"loss": loss, "gradient_norm": spread(1.0)}
        if logged and step in logged:
            numbers["log.loss"] = Spread(logged[step], logged[step], logged[step], 0, 0, 1)
        series.append(StepNumbers(step, step, numbers))
    window = made_window(series=tuple(series), steps=views)
    return list(NonfiniteLoss().judge(window))


def test_a_nan_from_step_30_on_that_the_log_hides_is_critical() -> None:
    (finding,) = judge([spread(1.3)] * 30 + [NAN] * 10, {25: 1.3, 35: 1.3})
    assert (finding.first_step, finding.severity, finding.ranks) == (30, "critical", (0, 1))
    assert finding.facts["is_logged_finite"] is True
    assert finding.facts["is_repeated"] is True
    assert finding.facts["has_finite_gradient"] is True
    assert "while the logger showed 1.3" in finding.summary
    assert any(e.kind == "log" and "showed 1.3 as `log.loss` at step 35" in e.summary for e in finding.evidence)


def test_a_nan_now_and_then_is_a_warning_and_once_an_information() -> None:
    losses = [spread(1.3)] * 40
    losses[20] = spread(1.2, num_nonfinite=1)
    (once,) = judge(losses)
    assert (once.first_step, once.severity) == (20, "info")
    losses[30] = NAN
    (twice,) = judge(losses)
    assert (twice.first_step, twice.severity) == (20, "warning")
    assert twice.facts["is_logged_finite"] is None
    assert any(e.kind == "missing" and "all are named" in e.summary for e in twice.evidence)


@pytest.mark.parametrize(("is_of_nothing", "severity"), [(False, "warning"), (True, "info"), (None, "info")])
def test_a_nan_that_was_made_once_is_a_warning_unless_no_label_counted(is_of_nothing, severity) -> None:
    origin = Origin(module="", module_class="", is_input_finite=False, input_absmax=0.0, replayed=False, reason="", is_of_nothing=is_of_nothing)  # fmt: skip
    numbers = [{"loss": spread(1.3, num_nonfinite=int(step == 20))} for step in range(40)]
    window = made_window(series=tuple(StepNumbers(i, i, known) for i, known in enumerate(numbers)), origins={(1, 20): origin})  # fmt: skip
    (finding,) = NonfiniteLoss().judge(window)
    assert (severity, 20, (1,)) == (finding.severity, finding.first_step, finding.ranks)


def test_a_log_that_shows_the_nan_hides_nothing() -> None:
    series = [spread(1.3)] * 5 + [NAN] * 3
    window = made_window(
        series=tuple(StepNumbers(i, i, {"loss": s, "log.loss": s}) for i, s in enumerate(series)),
    )
    (finding,) = NonfiniteLoss().judge(window)
    assert finding.facts["is_logged_finite"] is False


def test_a_nan_that_was_applied_is_not_its_own() -> None:
    tensor = Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)
    view = StepView(step=30, first_seen_ns=0, num_reported=2, missing=(), nonfinite=((0, tensor),))
    assert judge([spread(1.3)] * 30 + [NAN] * 10, None, view) == []


def test_finite_losses_are_silent() -> None:
    assert judge([spread(1e30), spread(0.0), spread(-4.0)] * 20) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"nonfinite_loss\.min_steps must be at least 1, got 0"):
        NonfiniteLoss(min_steps=0)
