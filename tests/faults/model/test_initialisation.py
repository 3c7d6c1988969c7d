"""Fires on a trained matrix of one value; quiet on what starts at one value by design."""

from typing import Any

import pytest

from holter.diagnosis import rank_causes
from holter.faults.model.initialisation import Initialisation
from holter.faults.window import Note
from holter.records import Census, Component, Finding, Mark, Named, TensorEntry, Vitals
from made_up import made_window


def tensor(name: str, *shape: int, marks: int = 0, module_class: str = "Linear", **fields: Any) -> TensorEntry:
    known = {"requires_grad": True, "is_buffer": False, "optimizer": 0}
    return TensorEntry(name, shape, "float32", module_class=module_class, marks=marks, **known | fields)


def census(*entries: TensorEntry) -> Census:
    return Census(
        model=0,
        wrapper="",
        is_replicated=False,
        optimizers=["SGD"],
        components=[Component("", "MLP", "", True)],
        backward_order=[],
        part=0,
        parts=1,
        entries=list(entries),
    )


def judge(*entries: TensorEntry, other: Census | None = None, vitals: Vitals | None = None) -> list[Finding]:
    known = census(*entries)
    window = made_window(
        census={0: known, 1: other or known},
        notes=(Note(0, 30, 0, vitals),) if vitals else (),
    )
    return list(Initialisation().judge(window))


CONSTANT = tensor("fc1.weight", 16, 32, marks=Mark.CONSTANT)
ZERO = tensor("fc1.weight", 16, 32, marks=Mark.CONSTANT | Mark.ZERO)
SOUND = (tensor("fc2.weight", 16, 16), tensor("fc3.weight", 4, 16))


def test_a_constant_matrix_is_named() -> None:
    (finding,) = judge(CONSTANT, *SOUND)
    assert (finding.severity, finding.first_step, finding.ranks) == ("warning", 0, (0, 1))
    assert (finding.tensors, finding.modules) == (("fc1.weight",), ("fc1",))
    (cause,) = rank_causes(finding)
    assert (cause.cause, cause.confidence) == ("implausible_initialisation", 0.93)
    assert any("fc1.weight (Linear), 16 x 32: one value in all 512 elements" in e.summary for e in finding.evidence)


def test_only_the_rank_that_has_it_is_named() -> None:
    (finding,) = judge(*SOUND, other=census(CONSTANT, *SOUND))
    assert finding.ranks == (1,)


def test_a_model_that_is_all_constant_is_a_remark() -> None:
    (finding,) = judge(CONSTANT)
    assert finding.severity == "info"


def test_a_matrix_stuck_at_zero_is_named() -> None:
    idle = Vitals(view="local", modules=[], num_trainable=3, zero_gradient=Named(1, ["fc1.weight"]), idle_steps=29)
    (finding,) = judge(ZERO, *SOUND, vitals=idle)
    assert (finding.first_step, finding.facts["is_stuck_at_zero"]) == (1, True)
    short = Vitals(view="local", modules=[], num_trainable=3, zero_gradient=Named(1, ["fc1.weight"]), idle_steps=8)
    assert judge(ZERO, *SOUND, vitals=short) == []


def test_a_matrix_that_had_a_gradient_at_first_has_left_zero() -> None:
    late = Vitals(view="local", modules=[], num_trainable=3, zero_gradient=Named(1, ["fc1.weight"]), idle_steps=16)
    assert judge(ZERO, *SOUND, vitals=late) == []


@pytest.mark.parametrize(
    "entry",
    [
        ZERO,
        tensor("fc1.bias", 512, marks=Mark.CONSTANT),
        tensor("norm.weight", 16, 32, marks=Mark.CONSTANT, module_class="LayerNorm"),
        tensor("block.ls.gamma", 1, 64, 1, 1, marks=Mark.CONSTANT, module_class="Block"),
        tensor("q.lora_B.default.weight", 16, 32, marks=Mark.CONSTANT | Mark.ZERO),
        tensor("mixer.scale", 16, 32, marks=Mark.CONSTANT, module_class="Mixer"),
        tensor("tiny.weight", 3, 3, marks=Mark.CONSTANT),
        tensor("encoder.weight", 16, 32, marks=Mark.CONSTANT, requires_grad=False),
        tensor("table", 16, 32, marks=Mark.CONSTANT, is_buffer=True),
        tensor("fc.weight", 16, 32, marks=Mark.ROUNDED | Mark.HUGE),
    ],
    ids=lambda entry: entry.name,
)
def test_what_starts_at_one_value_by_design_raises_nothing(entry: TensorEntry) -> None:
    assert judge(entry, *SOUND) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"initialisation\.idle_steps must be at least 1, got 0"):
        Initialisation(idle_steps=0)
