"""Fires when replicas part, asks for tables until it can name tensors, and says who left only where that is known."""

import math
from collections.abc import Mapping

import pytest

from holter.detectors import ClassHistory, ReplicaDivergence, StepView, TableKey, Window
from holter.records import Census, Finding, Table, TableRequest

SECOND = 1_000_000_000
NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]
Roots = dict[str, Mapping[int, tuple[int, ...]]]


def equal(last: int, first: int = 0) -> ClassHistory:
    return ClassHistory(
        first,
        is_equal_at_first=True,
        last_equal_step=last,
        first_unequal_step=None,
        num_equal=last - first + 1,
        num_unequal=0,
    )


def parted(at: int, *, now: int | None = None) -> ClassHistory:
    return ClassHistory(
        first_step=0,
        is_equal_at_first=at > 0,
        last_equal_step=at - 1 if at > 0 else None,
        first_unequal_step=at,
        num_equal=at,
        num_unequal=(at if now is None else now) - at + 1,
    )


def view(
    step: int,
    roots: Roots | None = None,
    *,
    missing: tuple[int, ...] = (),
    broke: tuple[int, ...] = (),
    kept: tuple[int, ...] = (),
) -> StepView:
    return StepView(step, step * SECOND, 2, missing, roots=roots or {}, broke_history=broke, kept_history=kept)


def table(tensor_class: str, root: int, changed: dict[str, int], norms: dict[str, float] | None = None) -> Table:
    return Table(
        tensor_class=tensor_class,
        root=root,
        names=NAMES,
        fingerprints=[changed.get(name, 7) for name in NAMES],
        norms=[(norms or {}).get(name, 1.0) for name in NAMES],
    )


def tables(tensor_class: str, step: int, *of_rank: Table) -> dict[TableKey, Table]:
    return {(tensor_class, step, rank): one for rank, one in enumerate(of_rank)}


def judge(
    *views: StepView,
    classes: dict[str, ClassHistory],
    tables: dict[TableKey, Table] | None = None,
    unavailable: frozenset[TableKey] = frozenset(),
    ranks: int = 2,
    now_s: float = 1000,
    census: dict[int, Census] | None = None,
) -> list[Finding]:
    window = Window(
        now_ns=int(now_s * SECOND),
        world_size=ranks,
        attached=frozenset(range(ranks)),
        steps=views,
        classes=classes,
        tables=tables or {},
        unavailable=unavailable,
        census=census or {},
    )
    return list(ReplicaDivergence().judge(window))


TWO = {11: (0,), 22: (1,)}
FLIPPED = {"parameters_before": parted(30), "gradients": equal(30), "parameters_after": parted(30)}
FLIPPED_TABLES = tables(
    "parameters_before", 30, table("parameters_before", 11, {}), table("parameters_before", 22, {"b.weight": 8})
)


def flipped(*, broke: tuple[int, ...] = (), kept: tuple[int, ...] = ()) -> StepView:
    return view(30, {"parameters_before": TWO, "parameters_after": TWO}, broke=broke, kept=kept)


def test_equal_replicas_raise_nothing() -> None:
    same = {11: (0, 1)}
    assert (
        judge(view(30, {"parameters_before": same}), classes={"parameters_before": equal(30), "gradients": equal(30)})
        == []
    )


def test_ranks_that_check_different_steps_raise_nothing() -> None:
    views = (view(30, {"parameters_before": {11: (0,)}}), view(31, {"parameters_before": {12: (1,)}}))
    assert judge(*views, classes={"parameters_before": equal(20)}) == []


def test_models_that_are_no_replicas_raise_nothing() -> None:
    census = Census(
        model=0, wrapper="Net", is_replicated=False, optimizers=["SGD"], backward_order=[], part=0, parts=1, entries=[]
    )
    assert judge(flipped(), classes=FLIPPED, tables=FLIPPED_TABLES, census={0: census, 1: census}) == []


def test_it_first_asks_for_the_tables_of_the_first_step_that_differed() -> None:
    (finding,) = judge(flipped(), classes=FLIPPED)
    assert finding.needs == (TableRequest("parameters_before", 30, (0, 1)),)


def test_it_asks_only_for_what_is_not_there_yet() -> None:
    one = {key: value for key, value in FLIPPED_TABLES.items() if key[2] == 0}
    (finding,) = judge(flipped(), classes=FLIPPED, tables=one)
    assert finding.needs == (TableRequest("parameters_before", 30, (1,)),)


def test_it_asks_two_ranks_a_group_and_eight_in_all() -> None:
    roots = {11: tuple(range(60)), 22: (60, 61, 62), 33: (63,)}
    (finding,) = judge(view(30, {"parameters_before": roots}), classes={"parameters_before": parted(30)}, ranks=64)
    assert finding.needs == (TableRequest("parameters_before", 30, (0, 1, 60, 61, 63)),)
    apart = {root: (root,) for root in range(64)}
    (finding,) = judge(view(30, {"parameters_before": apart}), classes={"parameters_before": parted(30)}, ranks=64)
    assert len(finding.needs[0].ranks) == 8


def test_the_rank_whose_own_history_broke_is_named_with_two_ranks() -> None:
    (finding,) = judge(view(29, kept=(0, 1)), flipped(broke=(1,), kept=(0,)), classes=FLIPPED, tables=FLIPPED_TABLES)
    assert finding.needs == ()
    assert finding.ranks == (1,)
    assert finding.first_step == 30
    assert finding.tensors == ("b.weight",)
    assert finding.modules == ("b",)
    assert finding.facts["own_history_broke_on_some"] is True
    assert finding.facts["gradients_differ"] is False
    assert finding.facts["parameters_differ_at_first"] is False
    assert finding.facts["parameters_differ_in_all_tensors"] is False
    assert finding.facts["parameters_parted_within_a_step"] is False
    assert any(e.kind == "history" and "rank 1 changed" in e.summary for e in finding.evidence)
    assert any("1 of 4 tensors differ (b.weight)" in e.summary for e in finding.evidence)
    assert any("agreed from step 0 to step 29, first differed at step 30" in e.summary for e in finding.evidence)


def test_a_history_that_broke_on_every_rank_names_nobody() -> None:
    (finding,) = judge(flipped(broke=(0, 1)), classes=FLIPPED, tables=FLIPPED_TABLES)
    assert finding.ranks == (0, 1)
    assert finding.facts["own_history_broke_on_some"] is False
    assert finding.facts["own_history_broke_on_all"] is True


def test_with_two_ranks_and_no_history_both_are_named_and_the_tie_is_said() -> None:
    (finding,) = judge(flipped(), classes=FLIPPED, tables=FLIPPED_TABLES)
    assert finding.ranks == (0, 1)
    assert finding.facts["own_history_broke_on_some"] is None
    assert finding.facts["is_culprit_known"] is False
    assert any(e.kind == "majority" and "no majority among ranks 0 and 1" in e.summary for e in finding.evidence)


def test_with_four_ranks_the_minority_is_named() -> None:
    given = tables(
        "parameters_before",
        30,
        *(table("parameters_before", 22 if r == 2 else 11, {"b.weight": r == 2}) for r in range(4)),
    )
    (finding,) = judge(
        view(30, {"parameters_before": {11: (0, 1, 3), 22: (2,)}}),
        classes={"parameters_before": parted(30)},
        tables=given,
        ranks=4,
    )
    assert finding.ranks == (2,)
    assert any("3 of 4 ranks agree; rank 2 differ" in e.summary for e in finding.evidence)


def test_two_against_two_is_a_tie() -> None:
    given = tables(
        "parameters_before", 30, *(table("parameters_before", 11 + r % 2, {"b.weight": r % 2}) for r in range(4))
    )
    (finding,) = judge(
        view(30, {"parameters_before": {11: (0, 2), 12: (1, 3)}}),
        classes={"parameters_before": parted(30)},
        tables=given,
        ranks=4,
    )
    assert finding.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("norm", [math.inf, math.nan, 1e30])
def test_an_implausible_norm_breaks_the_tie(norm: float) -> None:
    bad = table("parameters_before", 22, {"b.weight": 8}, norms={"b.weight": norm})
    given = tables("parameters_before", 30, table("parameters_before", 11, {}), bad)
    (finding,) = judge(flipped(), classes=FLIPPED, tables=given)
    assert finding.ranks == (1,)
    assert finding.facts["has_implausible_side"] is True
    assert any(
        e.kind == "implausible" and "b.weight" in e.summary and "rank 1 cannot be right" in e.summary
        for e in finding.evidence
    )


def test_a_norm_that_is_only_smaller_accuses_nobody() -> None:
    given = tables(
        "parameters_before",
        30,
        table("parameters_before", 11, {}),
        table("parameters_before", 22, {"b.weight": 8}, {"b.weight": 0.0}),
    )
    (finding,) = judge(flipped(), classes=FLIPPED, tables=given)
    assert finding.ranks == (0, 1)


def test_gradients_that_differ_in_all_tensors_from_the_first_step() -> None:
    roots: Roots = {"parameters_before": {5: (0, 1)}, "gradients": TWO, "parameters_after": TWO}
    classes = {
        "parameters_before": parted(1, now=5),
        "gradients": parted(0, now=5),
        "parameters_after": parted(0, now=5),
    }
    other = dict.fromkeys(NAMES, 8)
    given = tables("gradients", 0, table("gradients", 11, {}), table("gradients", 22, other))
    (asking,) = judge(view(0, roots), classes=classes)
    assert {request.tensor_class for request in asking.needs} == {"gradients", "parameters_after"}
    given |= tables("parameters_after", 0, table("parameters_after", 11, {}), table("parameters_after", 22, other))
    (finding,) = judge(view(0, roots), classes=classes, tables=given)
    assert finding.facts["first_class"] == "gradients"
    assert finding.facts["gradients_differ_always"] is True
    assert finding.facts["gradients_differ_in_all_tensors"] is True
    assert finding.facts["parameters_differ_at_first"] is False
    assert finding.tensors == tuple(NAMES)
    assert finding.ranks == (0, 1)


def test_a_gradient_that_is_zero_on_every_rank_does_not_count_against_all() -> None:
    norms = {"a.bias": 0.0}
    other = {name: 8 for name in NAMES if name != "a.bias"}
    given = tables("gradients", 0, table("gradients", 11, {}, norms), table("gradients", 22, other, norms))
    (finding,) = judge(view(0, {"gradients": TWO}), classes={"gradients": parted(0)}, tables=given)
    assert finding.facts["gradients_differ_in_all_tensors"] is True
    assert finding.tensors == ("a.weight", "b.weight", "b.bias")


def test_parameters_that_differ_from_the_start_while_gradients_agree() -> None:
    given = tables(
        "parameters_before",
        0,
        table("parameters_before", 11, {}),
        table("parameters_before", 22, dict.fromkeys(NAMES, 8)),
    )
    classes = {"parameters_before": parted(0, now=3), "gradients": equal(3), "parameters_after": parted(0, now=3)}
    (finding,) = judge(view(0, {"parameters_before": TWO}), classes=classes, tables=given)
    assert finding.first_step == 0
    assert finding.facts["parameters_differ_at_first"] is True
    assert finding.facts["gradients_differ"] is False


def test_tables_that_cannot_be_had_are_missing_evidence_not_a_wait() -> None:
    gone = frozenset({("parameters_before", 30, 0), ("parameters_before", 30, 1)})
    (finding,) = judge(flipped(), classes=FLIPPED, unavailable=gone)
    assert finding.needs == ()
    assert finding.tensors == ()
    assert finding.facts["parameters_differ_in_all_tensors"] is None
    assert any(e.kind == "missing" and "tables could not be had" in e.summary for e in finding.evidence)


def test_a_rank_that_has_not_reported_the_step_is_waited_for() -> None:
    late = view(30, {"parameters_before": {11: (0,), 22: (1,)}}, missing=(2,))
    assert judge(late, classes={"parameters_before": parted(30)}, ranks=3, now_s=31) == []
    assert len(judge(late, classes={"parameters_before": parted(30)}, ranks=3, now_s=33)) == 1


def test_once_its_beginning_is_forgotten_a_parting_is_not_judged_again() -> None:
    assert judge(view(500), classes=FLIPPED, tables=FLIPPED_TABLES) == []
    later = FLIPPED | {"gradients": parted(500)}
    assert judge(view(500, {"gradients": TWO}), classes=later, tables=FLIPPED_TABLES) == []


def test_weights_that_part_within_a_step_are_told_apart() -> None:
    classes = {"parameters_before": parted(31), "gradients": equal(31), "parameters_after": parted(30)}
    given = tables(
        "parameters_after", 30, table("parameters_after", 11, {}), table("parameters_after", 22, {"b.weight": 8})
    )
    (finding,) = judge(
        view(30, {"parameters_before": {5: (0, 1)}, "parameters_after": TWO}), classes=classes, tables=given
    )
    assert finding.facts["parameters_parted_within_a_step"] is True
