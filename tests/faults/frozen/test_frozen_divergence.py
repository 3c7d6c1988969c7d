"""Fires on frozen weights that differ between ranks or are none; says which side is implausible; quiet on what follows or is no replica."""

from typing import Any

import msgspec
import pytest

from holter.diagnosis import rank_causes
from holter.faults import ClassHistory, StepView, TableKey
from holter.faults.frozen.frozen_divergence import FrozenDivergence
from holter.records import Census, Component, Finding, Mark, Table, TableRequest, TensorEntry
from made_up import made_window

NAMES = ["encoder.first.weight", "encoder.first.bias", "encoder.second.weight"]
TWO = {11: (0,), 22: (1,)}


def census(num_replicas: int = 2, marks: int = 0, **more: Any) -> Census:
    frozen = [
        TensorEntry(name, (8, 8) if "weight" in name else (8,), "float32", False, False, -1, component=1, marks=marks)
        for name in NAMES
    ]
    frozen = [msgspec.structs.replace(entry, **more) for entry in frozen]
    return Census(
        model=0,
        wrapper="DistributedDataParallel",
        is_replicated=True,
        optimizers=["AdamW"],
        components=[
            Component("", "Net", "DistributedDataParallel", True, num_replicas),
            Component("encoder", "Encoder", "", False),
        ],
        backward_order=[],
        part=0,
        parts=1,
        entries=[TensorEntry("head.weight", (4, 8), "float32", True, False, 0, is_replicated=True), *frozen],
    )


def tables(
    marks: tuple[int, int] = (0, 0), norms: tuple[float, float] = (5.0, 5.1), step: int = 4, names: list[str] = NAMES
) -> dict[TableKey, Table]:
    return {
        ("frozen", step, rank): Table(
            tensor_class="frozen",
            root=11 * (rank + 1),
            names=names,
            fingerprints=[7 + rank] * len(names),
            norms=[norms[rank]] * len(names),
            marks=[marks[rank]] * len(names),
        )
        for rank in (0, 1)
    }


FROM_THE_START = ClassHistory(4, False, None, 4, 0, 2)
ALL_EQUAL = ClassHistory(0, True, 8, None, 3, 0)


def judge(
    known: dict[TableKey, Table],
    *,
    history: ClassHistory = FROM_THE_START,
    classes: dict[str, ClassHistory] | None = None,
    told: tuple[Census, ...] = (census(), census()),
    step: int = 4,
) -> list[Finding]:
    window = made_window(
        10**12,
        2,
        frozenset({0, 1}),
        steps=(StepView(step, 0, 2, (), roots={"frozen": TWO}),),
        classes={"frozen": history, "parameters_before": ALL_EQUAL} | (classes or {}),
        tables=known,
        census=dict(enumerate(told)),
    )
    return list(FrozenDivergence().judge(window))


@pytest.mark.parametrize(
    ("marks", "norms"),
    [
        ((0, Mark.ZERO | Mark.CONSTANT), (5.0, 0.0)),
        ((0, Mark.CONSTANT), (5.0, 8.0)),
        ((0, Mark.NONFINITE), (5.0, 5.0)),
        ((0, Mark.HUGE), (5.0, 5.0)),
        ((0, 0), (5.0, float("nan"))),
        ((0, 0), (5.0, 0.0)),
        ((0, 0), (5.0, 1e-30)),
        ((0, 0), (5.0, 900.0)),
    ],
)
def test_the_side_that_holds_no_weights_is_named(marks: tuple[int, int], norms: tuple[float, float]) -> None:
    (finding,) = judge(tables(marks, norms))
    assert (finding.severity, finding.ranks, finding.tensors) == ("critical", (1,), tuple(NAMES))
    assert finding.modules[0] == "encoder"
    cause = rank_causes(finding)[0]
    assert (cause.cause, cause.confidence) == ("frozen_component_uninitialised", 0.95)
    assert any(e.kind == "implausible" and "on rank 1" in e.summary for e in finding.evidence)


def test_plausible_weights_that_differ_are_a_mismatch_of_both() -> None:
    (finding,) = judge(tables())
    assert (finding.severity, finding.ranks) == ("warning", (0, 1))
    assert rank_causes(finding)[0].cause == "frozen_component_mismatch"
    assert -1 == finding.agreed_steps


def test_one_side_without_low_bits_has_passed_through_a_narrower_dtype() -> None:
    (finding,) = judge(tables((0, Mark.ROUNDED)))
    assert finding.ranks == (1,)
    assert rank_causes(finding)[0].cause == "precision_round_trip"


def test_it_asks_for_tables_and_for_those_of_the_last_agreement() -> None:
    later = ClassHistory(0, True, 16, 24, 3, 1)
    (finding,) = judge({}, history=later, step=24)
    assert finding.needs == (TableRequest("frozen", 24, (0, 1)), TableRequest("frozen", 16, (0, 1)))


def test_the_rank_whose_frozen_weights_changed_is_named() -> None:
    before = {
        key: msgspec.structs.replace(table, root=5, fingerprints=[7] * 3) for key, table in tables(step=16).items()
    }
    later = ClassHistory(0, True, 16, 24, 3, 1)
    (finding,) = judge(tables(step=24) | before, history=later, step=24)
    assert finding.ranks == (1,)
    assert rank_causes(finding)[0].cause == "silent_data_corruption"
    assert 16 == finding.agreed_steps
    # At that comparison another slice was read.
    unread = {key: msgspec.structs.replace(table, fingerprints=[0] * 3) for key, table in before.items()}
    (finding,) = judge(tables(step=24) | unread, history=later, step=24)
    assert -1 == finding.agreed_steps


def test_plausible_weights_where_training_is_no_replica_raise_nothing() -> None:
    assert judge(tables(), told=(census(0), census(0))) == []


def test_averages_that_follow_weights_that_parted_raise_nothing() -> None:
    parted = ClassHistory(0, True, 0, 4, 1, 3)
    assert judge(tables(), classes={"parameters_after": parted}) == []


def test_names_that_one_side_alone_holds_are_not_compared() -> None:
    mine, theirs = tables(), tables(names=["stage1.weight"])
    assert judge({("frozen", 4, 0): mine["frozen", 4, 0], ("frozen", 4, 1): theirs["frozen", 4, 1]}) == []


def test_shards_raise_nothing() -> None:
    assert judge(tables((0, Mark.ZERO)), told=(census(is_sharded=True), census(is_sharded=True))) == []


def test_components_of_zeros_or_nan_on_every_rank() -> None:
    window = made_window()
    for marks in (Mark.ZERO | Mark.CONSTANT, Mark.NONFINITE):
        told = census(marks=marks)
        (finding,) = FrozenDivergence().judge(made_window(census={0: told, 1: told}))
        assert (finding.ranks, finding.tensors) == ((0, 1), tuple(NAMES))
        assert rank_causes(finding)[0].cause == "frozen_component_uninitialised"
    assert list(FrozenDivergence().judge(window)) == []


def test_one_frozen_matrix_of_zeros_beside_others_is_meant_so() -> None:
    told = census()
    entries = [
        msgspec.structs.replace(entry, marks=int(Mark.ZERO)) if entry.name == NAMES[2] else entry
        for entry in told.entries
    ]
    told = msgspec.structs.replace(told, entries=entries)
    assert list(FrozenDivergence().judge(made_window(census={0: told, 1: told}))) == []


def test_a_frozen_component_in_another_dtype_on_one_rank_is_told_by_its_dtype() -> None:
    (finding,) = judge(tables(), told=(census(), census(dtype="bfloat16")))
    assert rank_causes(finding)[0].cause == "dtype_mismatch_across_ranks"
    assert finding.tensors == tuple(NAMES)
    said = [evidence.summary for evidence in finding.evidence]
    assert "encoder.first.weight is float32 on rank 0 and bfloat16 on rank 1" in said


@pytest.mark.parametrize(("marks", "is_found"), [(Mark.HUGE, True), (Mark.NONFINITE, True), (0, False)])
def test_a_frozen_shard_that_cannot_be_weights_on_some_rank_is_found_without_a_replica(marks, is_found):
    sound, odd = (census(axis="own", is_sharded=True, marks=mark) for mark in (0, int(marks)))
    found = list(FrozenDivergence().judge(made_window(census={0: sound, 1: odd})))
    assert [(1,)] * is_found == [finding.ranks for finding in found]
    assert ["frozen_component_uninitialised"] * is_found == [rank_causes(finding)[0].cause for finding in found]
