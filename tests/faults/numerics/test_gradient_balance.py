"""A module whose share of the gradient ran away from its own beginning; models that were built uneven are silent."""

import random
from collections.abc import Callable

import pytest

from holter.faults.numerics.gradient_balance import GradientBalance
from holter.faults.window import Note
from holter.records import Finding, ModuleVitals, Vitals
from made_up import made_window

USUAL = {"embed": 5.0, "a": 1.0, "b": 0.8, "c": 1.2, "d": 0.9, "e": 0.7, "head": 0.02}


def judge(norms: Callable[[int], dict[str, float]], num: int = 40, seed: int = 0) -> list[Finding]:
    noise = random.Random(seed)  # noqa: S311 - noise, no secret

    def note(i: int) -> Note:
        modules = [
            ModuleVitals(n, "float32", 64, 1.0, g * noise.lognormvariate(0, 0.4), 0, 0, g, 0.01, 1.0, 1e-3)
            for n, g in norms(i).items()
        ]
        return Note(0, 10 * i, i, Vitals(view="local", modules=modules, num_trainable=len(modules)))

    window = made_window(notes=tuple(note(i) for i in range(num)))
    return list(GradientBalance().judge(window))


@pytest.mark.parametrize("seed", range(8))
def test_a_module_that_outgrew_its_peers_is_named_with_its_step(seed: int) -> None:
    (finding,) = judge(lambda i: USUAL | {"a": 2000.0 if i >= 25 else 1.0}, seed=seed)
    assert finding.modules == ("a",)
    assert (finding.first_step, finding.severity) == (250, "warning")
    assert finding.facts["is_above"] is True
    assert "a 1" in finding.evidence[0].summary or "a 0" in finding.evidence[0].summary


def test_a_module_that_fell_away_is_named() -> None:
    (finding,) = judge(lambda i: USUAL | {"a": 1e-4 if i >= 25 else 1.0})
    assert (finding.modules, finding.facts["is_above"]) == (("a",), False)


@pytest.mark.parametrize("seed", range(8))
def test_healthy_gradients_are_silent(seed: int) -> None:
    cases: list[Callable[[int], dict[str, float]]] = [
        lambda _: USUAL | {"embed": 5000.0},
        lambda i: {name: norm * 0.7**i for name, norm in USUAL.items()},
        lambda i: USUAL | ({"late": 3000.0} if i >= 20 else {}),
        lambda i: USUAL | {"lora_a": 1e-4 * (i + 1)},
        lambda i: USUAL | {"a": 2000.0 if i == 39 else 1.0},
        lambda i: USUAL | {"head": 0.3 if i > 20 else 0.02},
    ]
    for case in cases:
        assert judge(case, seed=seed) == []


def test_a_short_run_has_no_beginning_to_compare_with() -> None:
    assert judge(lambda i: USUAL | {"a": 2000.0 if i >= 6 else 1.0}, num=14) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"gradient_balance\.min_checks must be at least 1, got 0"):
        GradientBalance(min_checks=0)
