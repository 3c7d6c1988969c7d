"""Fires on frozen tensors that an optimizer moves, or that change once; quiet on averages and copies."""

import msgspec

from holter.diagnosis import rank_causes
from holter.faults.frozen.frozen_movement import FrozenMovement
from holter.faults.window import Note
from holter.records import Census, Finding, Named, TensorEntry, Vitals
from made_up import made_window

NONE = Named()
BASE = Named(1, ["base.weight"])


def vitals(in_step: Named = NONE, between: Named = NONE, still: int = 0) -> Vitals:
    return Vitals(
        view="local",
        modules=[],
        num_trainable=2,
        frozen_moved_in_step=in_step,
        frozen_moved_between=between,
        frozen_still_checks=still,
    )


def judge(*said: tuple[int, Vitals], optimizer: int = 0) -> list[Finding]:
    census = Census(
        model=0,
        wrapper="DistributedDataParallel",
        is_replicated=True,
        optimizers=["SGD"],
        backward_order=[],
        part=0,
        parts=1,
        entries=[TensorEntry("base.weight", (4, 4), "float32", False, False, optimizer)],
    )
    notes = tuple(Note(step // 8 % 2, step, 0, body) for step, body in said)
    return list(FrozenMovement().judge(made_window(census={0: census, 1: census}, notes=notes)))


def test_a_decay_that_an_optimizer_applies_to_what_is_frozen() -> None:
    (finding,) = judge((8, vitals(in_step=BASE)), (16, vitals(in_step=BASE)))
    assert (finding.tensors, finding.first_step, finding.ranks) == (("base.weight",), 8, (0, 1))
    cause = rank_causes(finding)[0]
    assert (cause.cause, cause.confidence) == ("frozen_component_changed", 0.93)


def test_one_check_is_not_enough() -> None:
    assert judge((8, vitals(in_step=BASE)), (16, vitals())) == []


def test_an_average_that_is_updated_in_a_hook_of_the_optimizer_raises_nothing() -> None:
    assert judge(*((step, vitals(in_step=BASE)) for step in range(0, 80, 8)), optimizer=-1) == []


def test_a_decay_by_hand_goes_on_and_is_nothing_but_a_factor() -> None:
    decayed = msgspec.structs.replace(vitals(between=BASE), frozen_scaled=BASE)
    (finding,) = judge(*((step, decayed) for step in range(0, 80, 8)), optimizer=-1)
    assert (("base.weight",), 0, 16) == (finding.tensors, finding.first_step, finding.detected_step)
    assert "frozen_component_changed" == rank_causes(finding)[0].cause
    assert judge(*((step, vitals(between=BASE)) for step in range(0, 80, 8)), optimizer=-1) == []


def test_a_change_after_a_long_rest_that_is_followed_by_rest() -> None:
    event = (40, vitals(between=BASE, still=5)), (48, vitals()), (56, vitals())
    (finding,) = judge((32, vitals()), *event, optimizer=-1)
    assert finding.first_step == 40
    assert rank_causes(finding)[0].basis == "documented"


def test_averages_that_move_always_or_begin_late_raise_nothing() -> None:
    assert judge(*((step, vitals(between=BASE)) for step in range(0, 80, 8))) == []
    late = [(40, vitals(between=BASE, still=5))] + [(step, vitals(between=BASE)) for step in range(48, 96, 8)]
    assert judge(*late) == []
    assert judge(late[0]) == []


def test_the_first_of_many_changes_after_a_longer_rest_is_named() -> None:
    again = [(48, vitals(between=BASE, still=13))] + [(step, vitals(between=BASE)) for step in range(56, 80, 8)]
    (finding,) = judge(*again, optimizer=-1)
    assert (48, ("base.weight",)) == (finding.first_step, finding.tensors)
    other = Named(1, ["other.weight"])
    assert judge(again[0], (56, vitals(between=other)), (64, vitals(between=BASE)), optimizer=-1) == []
