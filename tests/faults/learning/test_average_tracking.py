"""Fires on an average that stands still or leaves; quiet on one that rests between updates."""

from holter.diagnosis import top_cause
from holter.faults.learning.average_tracking import AverageTracking
from holter.faults.window import Spread, StepNumbers
from holter.records import Finding
from made_up import made_window


def same(value: float) -> Spread:
    return Spread(value, value, value, 0, 1, 2)


def judge(moved: list[int], distances: list[float]) -> list[Finding]:
    series = tuple(
        StepNumbers(step, 0, {"ema.moved": same(flag), "ema.distance": same(distance)})
        for step, (flag, distance) in enumerate(zip(moved, distances, strict=True))
    )
    return list(AverageTracking().judge(made_window(series=series)))


def test_an_average_that_never_moves_is_found() -> None:
    (finding,) = judge([0] * 40, [0.01 * step for step in range(40)])
    assert (finding.severity, finding.first_step, finding.detected_step) == ("warning", 0, 20)
    assert top_cause(finding) == "average_not_tracking"
    assert "went from 0 to 0.2" in finding.evidence[1].summary


def test_an_average_that_follows_is_healthy() -> None:
    assert judge([0] + [1] * 59, [min(0.01 * step, 0.2) for step in range(60)]) == []


def test_one_that_is_updated_now_and_then_is_healthy() -> None:
    assert judge([int(step % 16 == 15) for step in range(120)], [0.01 * (step % 16) for step in range(120)]) == []


def test_weights_that_stand_still_themselves_are_no_fault_of_the_average() -> None:
    assert judge([0] * 40, [0.0] * 40) == []


def test_an_average_that_goes_away_is_found() -> None:
    (finding,) = judge([1] * 40, [0.2 * step for step in range(40)])
    assert finding.facts["is_copy_leaving"] is True
    assert top_cause(finding) == "average_not_tracking"


def test_an_average_that_lags_by_a_lot_and_settles_is_healthy() -> None:
    assert judge([1] * 40, [min(0.05 * step, 0.9) for step in range(40)]) == []


def judge_way(toward: float, changed: float, *, is_narrow: bool, logs: int = 40) -> list[Finding]:
    numbers = {"ema.moved": 1.0, "ema.distance": 0.1, "ema.toward": toward, "ema.changed": changed}
    numbers["ema.is_narrow"] = float(is_narrow)
    series = tuple(StepNumbers(step, 0, {name: same(value) for name, value in numbers.items()}) for step in range(logs))
    return list(AverageTracking().judge(made_window(series=series)))


def test_an_average_that_moves_away_step_by_step_is_found_before_it_is_far() -> None:
    (finding,) = judge_way(-0.9, 1.0, is_narrow=False)
    assert (True, "average_not_tracking") == (finding.facts["is_copy_leaving"], top_cause(finding))
    assert judge_way(0.9, 1.0, is_narrow=False) == []
    assert judge_way(-0.9, 1.0, is_narrow=False, logs=15) == []


def test_an_average_in_a_dtype_that_rounds_its_updates_away_is_found() -> None:
    (finding,) = judge_way(0.4, 0.1, is_narrow=True)
    assert "held in a narrow dtype" in finding.summary
    assert judge_way(0.4, 0.9, is_narrow=True) == []
    assert judge_way(0.4, 0.1, is_narrow=False) == []
