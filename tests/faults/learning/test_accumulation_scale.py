"""Fires when the norm follows the number of micro-batches as a sum does; quiet on means, trends and short last groups."""

import random

import pytest

from holter.diagnosis import top_cause
from holter.faults.learning.accumulation_scale import AccumulationScale
from holter.faults.window import Note, Spread, StepNumbers
from holter.records import Finding, ModuleVitals, Vitals
from made_up import made_window


def same(value: float) -> Spread:
    return Spread(value, value, value, 0, 1, 2)


def judge(
    counts: list[int], norms: list[float], *, divided: float | None = 0.0, given: list[float] | None = None
) -> list[Finding]:
    series = []
    for step, (count, norm) in enumerate(zip(counts, norms, strict=True)):
        numbers = {"micro_steps": same(count), "gradient_norm": same(norm)}
        series.append(StepNumbers(step, 0, numbers | ({} if divided is None else {"loss.is_divided": same(divided)})))
    notes = [
        Note(0, step, 0, Vitals(view="local", modules=[ModuleVitals("fc", "float32", 9, 1.0, norm, 0, 0, 1, 0, 1, 0.1)], num_trainable=1))
        for step, norm in enumerate(given or [])
    ]  # fmt: skip
    window = made_window(series=tuple(series), notes=tuple(notes))
    return list(AccumulationScale().judge(window))


COUNTS = [2, 2, 2, 2, 2, 2, 8, 8, 8, 8, 8, 8]


@pytest.mark.parametrize("power", [0.5, 0.75, 1.0])
def test_a_sum_is_found_whatever_the_noise(power: float) -> None:
    (finding,) = judge(COUNTS, [count**power for count in COUNTS])
    assert (finding.severity, finding.first_step) == ("warning", 0)
    assert top_cause(finding) == "accumulation_not_normalised"
    assert "2 micro-batches" in finding.evidence[0].summary


@pytest.mark.parametrize("power", [-0.5, -0.25, 0.0])
def test_a_mean_is_healthy_whatever_the_noise(power: float) -> None:
    noise = random.Random(0)  # noqa: S311 - noise, no secret
    assert judge(COUNTS, [count**power * noise.uniform(0.85, 1.15) for count in COUNTS]) == []


def test_a_norm_that_rises_over_the_run_is_no_matter() -> None:
    counts = [2] * 200 + [4] * 200
    assert judge(counts, [1 + step / 100 for step in range(400)]) == []


def test_closures_called_until_the_norm_is_small_are_no_sum() -> None:
    counts = [5] * 12 + [1] * 12
    assert judge(counts, [0.4 * 0.8**step for step in range(12)] + [0.02] * 12) == []
    assert judge(counts, [0.0125] * 12 + [1.3e-6] * 12) == []


def test_a_short_last_group_that_is_divided_by_the_full_number_is_information() -> None:
    counts = [4, 4, 4, 2] * 4
    (finding,) = judge(counts, [float(count) for count in counts], divided=1.0)
    assert finding.severity == "info"


def test_what_is_divided_after_backward_is_healthy() -> None:
    assert judge(COUNTS, [float(count) for count in COUNTS], given=[1.0] * len(COUNTS)) == []


def test_a_constant_number_and_an_undivided_loss_are_information() -> None:
    (finding,) = judge([4] * 12, [1.0] * 12)
    assert (finding.severity, top_cause(finding)) == ("info", "accumulation_not_normalised")
    assert judge([4] * 12, [1.0] * 12, divided=1.0) == []
    assert judge([4] * 12, [1.0] * 12, divided=None) == []


def test_no_accumulation_is_silent() -> None:
    assert judge([1] * 12, [1.0] * 12) == []
