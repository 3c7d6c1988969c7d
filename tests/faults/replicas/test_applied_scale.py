"""A whole factor between reduction and optimizer is found with its tensors; clips, noise, weights by tokens and accumulation are quiet."""

from collections.abc import Sequence
from typing import Any

import pytest
from tests.made_up import made_window

from holter.diagnosis import rank_causes
from holter.faults.replicas.applied_scale import AppliedScale
from holter.faults.window import Spread, StepNumbers
from holter.records import Finding, Table

NAMES = ["a.weight", "a.bias", "b.weight"]


def same(value: float) -> Spread:
    return Spread(value, value, value, 0, 1, 2)


def judge(
    factors: Sequence[Sequence[float]], *, has_tables: bool = True, numbers: Sequence[dict[str, float]] | None = None
) -> list[Finding]:
    """Factors of the three tensors at each step; all had a norm of one."""
    series, tables = [], {}
    for step, each in enumerate(factors):
        given = sum(factor**2 for factor in each) ** 0.5
        values = {"norm.gradients_reduced": 3**0.5, "norm.gradients": given, "micro_steps": 1.0}
        values |= numbers[step] if numbers else {}
        series.append(StepNumbers(step, step, {name: same(value) for name, value in values.items()}))
        for name, norms in (("gradients_reduced", [1.0] * 3), ("gradients", list(each))):
            tables[name, step, 0] = Table(tensor_class=name, root=1, names=NAMES, fingerprints=[5, 6, 7], norms=norms)
    known: dict[str, Any] = {"tables": tables} if has_tables else {}
    return list(AppliedScale().judge(made_window(series=tuple(series), **known)))


CALM = [(1.0, 1.0, 1.0)] * 12


def test_a_sum_where_a_mean_was_is_found_and_dated() -> None:
    (finding,) = judge([*CALM, *[(8.0, 8.0, 8.0)] * 6])
    assert ("warning", 12, tuple(NAMES)) == (finding.severity, finding.first_step, finding.tensors)
    assert "gradient_scale_mismatch" == rank_causes(finding)[0].cause
    assert 8.0 == pytest.approx(finding.evidence[0].values["factor"])


def test_one_tensor_every_third_step_is_found_by_its_table() -> None:
    (finding,) = judge([*CALM, *[(1.0, 1.0, 64.0), *CALM[:2]] * 5])
    assert ("b.weight",) == finding.tensors


def test_tables_are_asked_for_first() -> None:
    (finding,) = judge([*CALM, *[(8.0, 8.0, 8.0)] * 6], has_tables=False)
    assert "info" == finding.severity
    assert {(asked.tensor_class, asked.step) for asked in finding.needs} == {
        (name, step) for name in ("gradients_reduced", "gradients") for step in (12, 13, 14)
    }


@pytest.mark.parametrize(
    "factors",
    [
        [*CALM, *[(c, c, c) for c in (0.31, 0.27, 0.44, 0.38, 0.29)]],
        [*CALM, *[(1.2, 0.9, 1.1), (0.8, 1.3, 1.0), (1.1, 1.1, 0.7), (0.9, 1.0, 1.2)]],
        [*CALM, *[(0.0, 1.0, 1.0)] * 6],
        [(8.0, 8.0, 8.0)] * 20,
        [*[(0.1, 0.1, 0.1)] * 6, *CALM],
        [*CALM, *[(8.0, 8.0, 8.0)] * 3],
    ],
    ids=["a_clip_by_hand", "noise", "frozen_by_hand", "always", "a_warm_up", "too_few"],
)
def test_what_is_no_whole_factor_from_a_step_on_is_quiet(factors: list[tuple[float, ...]]) -> None:
    assert [] == judge(factors)


def test_a_division_by_the_number_of_micro_batches_is_quiet() -> None:
    sizes = [{"micro_steps": 1.0}] * 12 + [{"micro_steps": 4.0}] * 6
    assert [] == judge([*CALM, *[(0.25, 0.25, 0.25)] * 6], numbers=sizes)


def test_a_loss_scale_is_taken_out() -> None:
    scales = [{"loss_scale": 1024.0}] * 12 + [{"loss_scale": 512.0}] * 6
    factors = [(1 / 1024,) * 3] * 12 + [(1 / 512,) * 3] * 6
    assert [] == judge(factors, numbers=scales)
    (finding,) = judge([*factors[:12], *[(4 / 512,) * 3] * 6], numbers=scales)
    assert 12 == finding.first_step


def test_a_clip_after_it_hides_nothing() -> None:
    clip = [{"clip.norm": 3**0.5, "clip.limit": 5.0}] * 12 + [{"clip.norm": 8 * 3**0.5, "clip.limit": 5.0}] * 6
    left = 5.0 / (8 * 3**0.5)
    (finding,) = judge([*CALM, *[(8 * left,) * 3] * 6], numbers=clip)
    assert 8.0 == pytest.approx(finding.evidence[0].values["factor"], rel=1e-3)
