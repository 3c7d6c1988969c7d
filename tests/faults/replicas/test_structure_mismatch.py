"""Fires on replicas that differ in structure; quiet on shards, stages and experts, and on changes that are still under way."""

import msgspec
import pytest

from holter.diagnosis import rank_causes
from holter.faults import StepView
from holter.faults.replicas.structure_mismatch import StructureMismatch
from holter.faults.window import CensusChange
from holter.records import Census, Component, Finding, TensorEntry
from made_up import made_window

SECOND = 10**9


def entry(name: str, **more: object) -> TensorEntry:
    plain = TensorEntry(name, (4, 4), "float32", True, False, 0, is_replicated=True)
    return msgspec.structs.replace(plain, **more)


def census(*entries: TensorEntry, num_replicas: int = 2, wrapper: str = "DistributedDataParallel") -> Census:
    return Census(
        model=0,
        wrapper=wrapper,
        is_replicated=True,
        optimizers=["SGD"],
        components=[Component("", "Net", wrapper, True, num_replicas)],
        backward_order=[],
        part=0,
        parts=1,
        entries=list(entries),
    )


def judge(
    *told: Census,
    changes: tuple[CensusChange, ...] = (),
    steps: int = 3,
    now_s: float = 1,
    told_at: tuple[int, ...] = (),
) -> list[Finding]:
    views = tuple(StepView(step, 0, len(told), ()) for step in range(steps))
    window = made_window(
        int(now_s * SECOND),
        len(told),
        frozenset(range(len(told))),
        steps=views,
        census=dict(enumerate(told)),
        census_steps=dict(enumerate(told_at)),
        changes=changes,
    )
    return list(StructureMismatch().judge(window))


A, B, HEAD = entry("a.weight"), entry("b.weight"), entry("head.weight")


def frozen(of: TensorEntry) -> TensorEntry:
    return msgspec.structs.replace(of, requires_grad=False, optimizer=-1)


def top(finding: Finding) -> str:
    return rank_causes(finding)[0].cause


def test_ranks_that_freeze_different_layers() -> None:
    (finding,) = judge(census(frozen(A), B, HEAD), census(A, frozen(B), HEAD))
    assert (finding.severity, finding.first_step, finding.ranks) == ("critical", 0, (0, 1))
    assert (finding.tensors, finding.modules) == (("a.weight", "b.weight"), ("a", "b"))
    assert top(finding) == "frozen_set_mismatch"
    assert any("a.weight is frozen on rank 0 and trained on rank 1" in e.summary for e in finding.evidence)


def test_the_minority_is_named() -> None:
    usual, odd = census(frozen(A), B, num_replicas=4), census(A, B, num_replicas=4)
    (finding,) = judge(usual, usual, odd, usual)
    assert (finding.ranks, finding.tensors) == ((2,), ("a.weight",))


@pytest.mark.parametrize(
    ("other", "cause", "tensors"),
    [
        ((A, entry("c.weight"), HEAD), "model_structure_mismatch", {"b.weight", "c.weight"}),
        ((A, entry("b.weight", shape=(4, 8)), HEAD), "model_structure_mismatch", {"b.weight"}),
        ((B, A, HEAD), "model_structure_mismatch", {"a.weight", "b.weight"}),
        ((A, entry("b.weight", dtype="bfloat16"), HEAD), "dtype_mismatch_across_ranks", {"b.weight"}),
    ],
)
def test_other_names_shapes_order_and_dtypes(other: tuple[TensorEntry, ...], cause: str, tensors: set[str]) -> None:
    (finding,) = judge(census(A, B, HEAD), census(*other))
    assert top(finding) == cause
    assert set(finding.tensors) == tensors


def test_equal_models_and_what_is_odd_about_values_raise_nothing() -> None:
    assert judge(census(A, B), census(A, entry("b.weight", marks=2, optimizer=-1))) == []


def test_a_rank_that_has_not_told_yet_is_waited_for() -> None:
    views = (StepView(5, 0, 2, ()),)
    window = made_window(SECOND, 2, frozenset({0, 1}), steps=views, census={0: census(A)})
    assert list(StructureMismatch().judge(window)) == []
    assert len(judge(census(A), census(B))) == 1


@pytest.mark.parametrize(
    ("one", "two"),
    [
        # stages of a pipeline
        (
            census(entry("a.weight", is_replicated=False), num_replicas=0),
            census(entry("b.weight", is_replicated=False), num_replicas=0),
        ),
        # shards of a tensor-parallel layer
        (census(A, entry("b.weight", is_sharded=True)), census(A, entry("b.weight", shape=(4, 8), is_sharded=True))),
        # experts and tables that the wrapper was told to ignore
        (
            census(A, entry("expert.weight", is_replicated=False)),
            census(A, entry("expert.weight", is_replicated=False, shape=(4, 8))),
        ),
        (
            census(A, entry("expert0.weight", is_replicated=False)),
            census(A, entry("expert1.weight", is_replicated=False)),
        ),
        # a cache that grows as it is used
        (census(A, entry("cache", is_buffer=True)), census(A, entry("cache", is_buffer=True, shape=(8,)))),
        # replicas of a smaller group
        (census(A, num_replicas=1), census(B, num_replicas=1)),
    ],
)
def test_what_is_no_replica_over_all_ranks_raises_nothing(one: Census, two: Census) -> None:
    assert judge(one, two) == []


def test_layers_unfrozen_on_all_ranks_are_waited_for_until_all_have_told() -> None:
    changed = (CensusChange(0, 50, "a.weight", "requires_grad", "False", "True"),)
    early, late = census(A, B), census(frozen(A), B)
    assert judge(early, late, changes=changed, steps=51) == []
    assert judge(early, late, changes=changed, steps=52) == []
    assert judge(early, early, changes=changed, steps=60) == []
    (finding,) = judge(early, late, changes=changed, steps=53)
    assert finding.first_step == 50


def test_a_rank_that_was_first_heard_after_layers_were_unfrozen_is_not_held_against_what_others_were() -> None:
    early, late = census(A, B), census(frozen(A), B)
    assert judge(early, late, told_at=(24, 0), steps=25) == []
    assert len(judge(early, late, told_at=(24, 0), steps=27)) == 1


def test_a_mismatch_at_the_start_waits_for_the_first_steps() -> None:
    assert judge(census(A, B), census(B, A), steps=1) == []
    assert len(judge(census(A, B), census(B, A), steps=1, now_s=60)) == 1


def shard(name: str, **more: object) -> TensorEntry:
    return entry(name, is_replicated=False, is_sharded=True, axis="own", placements="dp=S(0)", **more)


def test_shards_are_compared_by_their_whole_shapes_their_frozenness_and_what_they_are_cast_to() -> None:
    mine = census(shard("a.weight"), shard("b.weight"), wrapper="FSDPNet")
    assert [] == judge(mine, census(shard("a.weight"), shard("b.weight"), wrapper="FSDPNet"))
    for other, cause in (
        (shard("b.weight", requires_grad=False), "frozen_set_mismatch"),
        (shard("b.weight", policy="bfloat16,float32"), "dtype_mismatch_across_ranks"),
        (shard("b.weight", shape=(8, 4)), "model_structure_mismatch"),
    ):
        (finding,) = judge(mine, census(shard("a.weight"), other, wrapper="FSDPNet"))
        assert cause == rank_causes(finding)[0].cause
        assert ("b.weight",) == finding.tensors
