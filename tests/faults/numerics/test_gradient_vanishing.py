"""Modules with hardly any gradient beside others that have one; converged runs and gates that open are silent."""

import random
from collections.abc import Sequence

import pytest

from holter.diagnosis import top_cause
from holter.faults.numerics.gradient_vanishing import GradientVanishing
from holter.faults.window import Note
from holter.records import Finding, ModuleVitals, Named, Vitals
from made_up import made_window


def note(step: int, norms: dict[str, float], learning_rate: float = 1e-3) -> Note:
    modules = [ModuleVitals(n, "float32", 64, 1.0, g, 0, 0, g, 0.01, 1.0, learning_rate) for n, g in norms.items()]
    return Note(step % 2, step, step, Vitals(view="local", modules=modules, num_trainable=len(modules)))


def judge(notes: Sequence[Note]) -> list[Finding]:
    window = made_window(notes=tuple(notes))
    return list(GradientVanishing().judge(window))


DEEP = {f"layers.{i}": 10.0 ** -(14 - i) for i in range(14)}


def test_the_far_end_of_a_deep_sigmoid_net_is_named() -> None:
    (finding,) = judge([note(step, DEEP) for step in range(0, 60, 10)])
    assert finding.modules == tuple(f"layers.{i}" for i in range(6))
    assert (finding.first_step, finding.severity) == (0, "warning")
    assert finding.facts["is_from_start"] is True
    assert "layers.13 has 0.1" in finding.summary
    assert finding.evidence[0].values["num_checks"] == 6


def test_a_module_that_vanishes_later_is_dated() -> None:
    notes = [note(step, {"a": 1.0, "b": 0.5, "c": 1.0 if step < 50 else 1e-9}) for step in range(0, 120, 10)]
    (finding,) = judge(notes)
    assert (finding.first_step, finding.modules) == (50, ("c",))


def test_few_checks_are_no_evidence() -> None:
    assert judge([note(step, DEEP) for step in range(0, 40, 10)]) == []


@pytest.mark.parametrize("seed", range(8))
def test_healthy_gradients_are_silent(seed: int) -> None:
    noise = random.Random(seed)  # noqa: S311 - noise, no secret

    def checks(norms: dict[str, float], factor: float) -> list[Note]:
        return [note(i, {n: g * factor**i * noise.lognormvariate(0, 1) for n, g in norms.items()}) for i in range(40)]

    assert judge(checks({"a": 1.0, "b": 0.01, "c": 0.3}, 0.5)) == []
    assert judge(checks({"head": 1.0, "block": 1e-4, "norm": 0.01}, 1.0)) == []


def test_exact_zeros_frozen_modules_and_gates_that_open_are_silent() -> None:
    assert judge([note(i, {"a": 1.0, "b": 0.0, "c": 0.5}) for i in range(10)]) == []
    assert judge([note(i, {"a": 1.0, "b": 1e-12}, learning_rate=0.0) for i in range(10)]) == []
    assert judge([note(i, {"lora_b": 1.0, "x": 1.0, "lora_a": 1e-9 * (i + 1)}) for i in range(10)]) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"gradient_vanishing\.min_checks must be at least 2, got 1"):
        GradientVanishing(min_checks=1)


def faint(steps: Sequence[int], since: int) -> list[Finding]:
    modules = note(0, {"head": 0.05, "body": 0.4}).body.modules  # type: ignore[union-attr]
    notes = [
        Note(0, step, step, Vitals(view="replicated", modules=modules, num_trainable=4, faint=Named(1, ["head.weight"]) if step >= since else Named()))
        for step in steps
    ]  # fmt: skip
    return judge(notes)


def test_a_matrix_without_gradient_is_named_though_the_bias_beside_it_has_one() -> None:
    (finding,) = faint(range(0, 64, 8), 16)
    assert (finding.tensors, finding.modules, finding.first_step) == (("head.weight",), ("head",), 16)
    assert top_cause(finding) == "vanishing_gradients"
    assert faint(range(0, 48, 8), 16) == []
    assert faint(range(8), 0) == []


def test_all_gradients_that_fall_at_once_are_named_and_dated() -> None:
    notes = [note(step, {"a": 1e-6, "b": 3e-6} if step >= 50 else {"a": 1.0, "b": 2.0}) for step in range(0, 80, 10)]
    (finding,) = judge(notes)
    assert (50, "vanishing_gradients") == (finding.first_step, top_cause(finding))
    assert judge(notes[:7]) == [], "two checks are no evidence"


def test_gradients_that_fall_step_by_step_or_rarely_are_silent() -> None:
    assert judge([note(10 * i, {"a": 0.1**i, "b": 0.1**i}) for i in range(20)]) == [], "it has been learned"
    turns = [1.0, 1.0, 1.0, 1e-6, 1.0, 1e-6, 1e-6, 1.0]
    assert judge([note(10 * i, {"a": norm, "b": norm}) for i, norm in enumerate(turns)]) == []
