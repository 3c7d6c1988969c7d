"""Fires when replicas part, asks for tables until it can name tensors, and says who left only where that is known."""

import math
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from holter.diagnosis import rank_causes
from holter.faults import ClassHistory, StepView, TableKey
from holter.faults.replicas.replica_divergence import ReplicaDivergence
from holter.faults.window import CallCounts, Spread, StepNumbers
from holter.records import Census, Component, Finding, Mark, Table, TableRequest, TensorEntry
from made_up import made_window

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
    counts: tuple[CallCounts, ...] = (),
    series: tuple[StepNumbers, ...] = (),
) -> list[Finding]:
    window = made_window(
        now_ns=int(now_s * SECOND),
        world_size=ranks,
        attached=frozenset(range(ranks)),
        steps=views,
        classes=classes,
        tables=tables or {},
        unavailable=unavailable,
        census=census or {},
        counts={"0": counts} if counts else {},
        series=series,
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
    assert finding.facts["were_all_set_at_once"] is False


KEPT = [view(step, kept=(0, 1)) for step in range(26, 30)]


def test_a_history_that_broke_where_the_other_was_not_read_names_its_rank() -> None:
    (finding,) = judge(*KEPT, flipped(broke=(1,)), classes=FLIPPED, tables=FLIPPED_TABLES)
    assert finding.ranks == (1,)
    assert finding.facts["own_history_broke_on_all"] is False
    assert any("rank 0 could not be read there" in e.summary for e in finding.evidence)


def test_weights_that_every_rank_set_anew_at_one_step_were_not_corrupted() -> None:
    """A layer is initialised again, on each rank from its own random state."""
    (finding,) = judge(*KEPT, flipped(broke=(0, 1)), classes=FLIPPED, tables=FLIPPED_TABLES)
    assert ("unsynced_initialisation", (0, 1)) == (top(finding), finding.ranks)
    assert any("it had not done so before" in one.summary for one in finding.evidence)
    # A script that writes to its weights now and then has a habit, which explains no parting.
    (habit,) = judge(*KEPT[:3], view(29, broke=(0, 1)), flipped(broke=(0, 1)), classes=FLIPPED, tables=FLIPPED_TABLES)
    assert top(habit) != "unsynced_initialisation"


@pytest.mark.parametrize(
    "earlier",
    [
        pytest.param(KEPT[:1], id="too few steps were read to know what is usual"),
        pytest.param([*KEPT[:3], view(29, broke=(0, 1))], id="the script changes weights itself now and then"),
    ],
)
def test_a_history_that_broke_where_the_other_was_not_read_may_say_nothing(earlier: list[StepView]) -> None:
    (finding,) = judge(*earlier, flipped(broke=(1,)), classes=FLIPPED, tables=FLIPPED_TABLES)
    assert finding.ranks == (0, 1)
    assert finding.facts["own_history_broke_on_some"] is None
    assert finding.facts["own_history_broke_on_all"] is None


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


def counted(last: int, left_out: int = 99) -> tuple[CallCounts, ...]:
    """Two calls a step, up to a step; rank 1 leaves those of one step out."""
    alike = tuple(CallCounts(step, {2 * step: (0, 1)}) for step in range(20, min(left_out, last + 1)))
    return alike + tuple(CallCounts(step, {2 * step: (0,), 2 * step - 2: (1,)}) for step in range(left_out, last + 1))


@pytest.mark.parametrize(
    ("counts", "spoken_s"),
    [
        ((), 30.0),
        # What was called in the steps after it is still to be told, or never is.
        (counted(30), 34.0),
        (counted(32), 30.0),
        # A rank left its calls out: others say it, and have time to find out which.
        (counted(32, left_out=30), 36.0),
    ],
)
def test_gradients_that_part_suddenly_wait_for_the_counts_of_calls(
    counts: tuple[CallCounts, ...], spoken_s: float
) -> None:
    given = tables("gradients", 30, table("gradients", 11, {}), table("gradients", 22, dict.fromkeys(NAMES, 8)))
    more = {"classes": {"gradients": parted(30)}, "counts": counts}
    (asking,) = judge(view(30, {"gradients": TWO}), now_s=30.0, **more)
    assert asking.needs, "tables are asked for at once: ranks forget them"
    found = {
        now_s: judge(view(30, {"gradients": TWO}), tables=given, now_s=now_s, **more)
        for now_s in (30.0, 33.9, 34.1, 35.9, 36.1)
    }
    assert {now_s: now_s >= spoken_s for now_s in found} == {now_s: bool(one) for now_s, one in found.items()}


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


# Gradients: at the reduction or after it, all or a few, once or ever since.

HISTORIES = {"parameters_before": parted(25, now=40), "parameters_after": parted(24, now=40)}
OTHER = dict.fromkeys(NAMES, 8)
SAME = {5: (0, 1)}


def given(tensor_class: str, step: int, changed: dict[str, int], **columns: dict[str, float]) -> dict[TableKey, Table]:
    """Tables of ranks 0 and 1; a column names what rank 1 has otherwise."""
    one, two = table(tensor_class, 11, {}), table(tensor_class, 22, changed, columns.get("norms"))
    sums = columns.get("sums")
    if sums is not None:
        one = msgspec.structs.replace(one, sums=[1.0] * len(NAMES))
        two = msgspec.structs.replace(two, sums=[sums.get(name, 1.0) for name in NAMES])
    return tables(tensor_class, step, one, two)


def top(finding: Finding) -> str:
    return rank_causes(finding)[0].cause


def test_hooks_that_are_lost_in_the_middle_are_a_bypass_once_gradients_differ_ever_since() -> None:
    roots: Roots = {"gradients_reduced": TWO, "gradients": TWO, "parameters_after": TWO}
    classes = HISTORIES | {"gradients_reduced": parted(24, now=32), "gradients": parted(24, now=32)}
    known = given("gradients_reduced", 24, OTHER) | given("parameters_after", 24, OTHER)
    (finding,) = judge(view(24, roots), view(32, roots), classes=classes, tables=known)
    assert finding.facts["gradients_differ_ever_since"] is True
    assert finding.facts["gradients_differ_once"] is False
    assert top(finding) == "gradient_sync_bypassed"
    assert (finding.first_step, finding.tensors) == (24, tuple(NAMES))


def test_gradients_that_differ_at_one_step_and_agree_again_are_one_bad_delivery() -> None:
    roots: Roots = {"gradients_reduced": TWO, "gradients": TWO, "parameters_after": TWO}
    classes = HISTORIES | {"gradients_reduced": parted(24, now=24), "gradients": parted(24, now=24)}
    known = given("gradients_reduced", 24, OTHER) | given("parameters_after", 24, OTHER)
    later = view(32, {"gradients_reduced": SAME, "gradients": SAME, "parameters_after": TWO})
    (finding,) = judge(view(24, roots), later, classes=classes, tables=known)
    assert finding.facts["gradients_differ_once"] is True
    assert top(finding) == "corrupted_collective"


def test_a_step_that_one_rank_alone_checked_is_no_agreement() -> None:
    roots: Roots = {"gradients_reduced": TWO, "parameters_after": TWO}
    classes = HISTORIES | {"gradients_reduced": parted(24, now=26)}
    known = given("gradients_reduced", 24, OTHER) | given("parameters_after", 24, OTHER)
    alone = view(30, {"gradients_reduced": {7: (0,)}})
    (finding,) = judge(view(24, roots), alone, view(32, roots), classes=classes, tables=known)
    assert finding.facts["gradients_differ_ever_since"] is True


def test_gradients_of_a_few_tensors_that_nobody_reduces() -> None:
    roots: Roots = {"gradients_reduced": TWO, "gradients": TWO, "parameters_after": TWO}
    classes = {
        "gradients_reduced": parted(0, now=8),
        "gradients": parted(0, now=8),
        "parameters_after": parted(0, now=8),
    }
    a = {"a.weight": 8, "a.bias": 8}
    known = given("gradients_reduced", 0, a) | given("parameters_after", 0, a)
    (finding,) = judge(view(0, roots), view(8, roots), classes=classes, tables=known)
    assert finding.tensors == ("a.weight", "a.bias")
    assert top(finding) == "unreduced_parameters"
    assert rank_causes(finding)[0].ranks == (0, 1)


@pytest.mark.parametrize(
    ("weights", "at"), [("parameters_before", 13), ("parameters_after", 12)], ids=["between", "within"]
)
def test_gradients_that_part_because_the_weights_did_are_not_the_beginning(weights: str, at: int) -> None:
    roots: Roots = {"parameters_before": TWO, "gradients_reduced": TWO, "gradients": TWO, "parameters_after": TWO}
    agreed: Roots = {name: {1: (0, 1)} for name in roots}
    classes = {name: parted(13, now=14) for name in roots} | {weights: parted(at, now=14)}
    norm, gradient = {"a.bias": 8}, {"b.weight": 8}
    known = given(weights, at, norm) | given("gradients_reduced", 13, gradient) | given("gradients", 13, gradient)
    (finding,) = judge(
        view(11, agreed, kept=(0, 1)),
        view(12, agreed | ({weights: TWO} if at == 12 else {}), kept=(0, 1)),
        view(13, roots, broke=(1,) if at == 13 else (), kept=(0,) if at == 13 else (0, 1)),
        view(14, roots, kept=(0, 1)),
        classes=classes,
        tables=known,
    )
    assert ("a.bias",) == finding.tensors
    assert finding.facts["gradients_differ"] is False
    assert top(finding) == ("silent_data_corruption" if at == 13 else "optimizer_state_mismatch")
    assert any("nothing reduces them between these ranks" in proof.summary for proof in finding.evidence)


def test_gradients_that_differ_at_the_same_comparison_may_have_come_first() -> None:
    roots: Roots = {"parameters_before": TWO, "gradients_reduced": TWO, "gradients": TWO}
    classes = {name: parted(16, now=24) for name in roots}
    known = given("parameters_before", 16, {"a.bias": 8}) | given("gradients_reduced", 16, {"a.bias": 8})
    (finding,) = judge(view(16, roots), view(24, roots), classes=classes, tables=known)
    assert top(finding) == "unreduced_parameters"


def entry(name: str, **more: bool) -> TensorEntry:
    facts = {"is_replicated": True, "requires_grad": True} | more
    shape = (4, 4) if name.endswith("weight") else (4,)
    return TensorEntry(name, shape, "float32", facts["requires_grad"], False, 0, facts["is_replicated"])


def census(*names: str, is_find_unused: bool = False) -> Census:
    return Census(
        model=0,
        wrapper="DistributedDataParallel",
        is_replicated=True,
        optimizers=["SGD"],
        components=[Component("", "Net", "DistributedDataParallel", True, 2, is_find_unused)],
        backward_order=[],
        part=0,
        parts=1,
        entries=[entry(name) for name in names],
    )


@pytest.mark.parametrize(
    ("is_find_unused", "cause"), [(False, "unreduced_parameters"), (True, "gradient_sync_bypassed")]
)
def test_a_parameter_without_gradient_explains_why_its_bucket_is_never_reduced(
    is_find_unused: object, cause: str
) -> None:
    roots: Roots = {"gradients_reduced": TWO}
    everyone = [*NAMES, "spare.weight"]
    known = {
        key: msgspec.structs.replace(t, names=everyone, fingerprints=[*t.fingerprints, 0], norms=[*t.norms, 0.0])
        for key, t in given("gradients_reduced", 0, OTHER).items()
    }
    told = census(*everyone, is_find_unused=bool(is_find_unused))
    (finding,) = judge(
        view(0, roots), classes={"gradients_reduced": parted(0)}, tables=known, census={0: told, 1: told}
    )
    assert finding.facts["gradients_differ_in_all_tensors"] is True
    assert finding.tensors == tuple(NAMES)
    assert top(finding) == cause
    assert is_find_unused or any("spare.weight is trained" in e.summary for e in finding.evidence)


def test_a_matrix_that_agrees_shows_that_the_rest_is_left_out_of_a_working_reduction() -> None:
    names = [f"layer{number}.bias" for number in range(19)] + ["head.weight"]
    known = {
        ("gradients", 0, rank): Table(
            tensor_class="gradients",
            root=11 + rank,
            names=names,
            fingerprints=[7 + rank] * 19 + [7],
            norms=[1.0] * 20,
        )
        for rank in (0, 1)
    }
    told = census(*names)
    (finding,) = judge(
        view(0, {"gradients": TWO}), classes={"gradients": parted(0)}, tables=known, census={0: told, 1: told}
    )
    assert finding.facts["gradients_differ_in_all_tensors"] is False


# Between the reduction and the optimizer.


def clipped(
    *scaled: dict[str, float], ranks: int = 2, unread: str = "", factor_before: float | None = None
) -> list[Finding]:
    """Each rank's factors by tensor; ranks with the same factors have the same root."""
    before = {"norm.gradients_reduced": 4.0, "norm.gradients": 4.0 * (factor_before or 0.0)} if factor_before else {}
    series = tuple(
        StepNumbers(step, step, {name: Spread(norm, norm, norm, 0, 1, ranks) for name, norm in before.items()})
        for step in range(8)
    )
    distinct = [tuple(factors.get(name, 1.0) for name in NAMES) for factors in scaled]
    known = {}
    for rank, factors in enumerate(distinct):
        reduced = table("gradients_reduced", 5, {unread: 0}, dict.fromkeys(NAMES, 2.0))
        known["gradients_reduced", 8, rank] = reduced
        known["gradients", 8, rank] = Table(
            tensor_class="gradients",
            root=hash(factors),
            names=NAMES,
            fingerprints=[
                (old or 7) if factor == 1 else 1 + int(1e6 * factor)
                for old, factor in zip(reduced.fingerprints, factors, strict=True)
            ],
            norms=[2.0 * factor for factor in factors],
        )
    roots = {hash(f): tuple(r for r, other in enumerate(distinct) if other == f) for f in distinct}
    shown = view(8, {"gradients_reduced": {5: tuple(range(ranks))}, "gradients": roots})
    classes = {"gradients_reduced": equal(8), "gradients": parted(8)}
    return judge(shown, classes=classes, tables=known, ranks=ranks, series=series)


ALL_BY = dict.fromkeys(NAMES, 0.31)
BUT_LN = ALL_BY | {"b.weight": 1.0, "b.bias": 1.0}


def test_the_rank_that_skips_tensors_in_its_clip_is_named_with_two_ranks() -> None:
    (finding,) = clipped(ALL_BY, BUT_LN)
    assert (finding.ranks, finding.tensors, finding.modules) == ((1,), ("b.weight", "b.bias"), ("b",))
    assert top(finding) == "uneven_clipping"
    assert rank_causes(finding)[0].confidence == 0.95
    assert any(
        e.kind == "clipping" and "rank 1 multiplied the tensors that differ by 1" in e.summary for e in finding.evidence
    )


def test_all_ranks_that_skip_are_named_although_they_are_the_majority() -> None:
    (finding,) = clipped(ALL_BY, BUT_LN, BUT_LN, BUT_LN, ranks=4)
    assert finding.ranks == (1, 2, 3)


@pytest.mark.parametrize(
    ("zero", "one", "culprits"),
    [
        (ALL_BY, {}, (1,)),  # one of two does not clip at all
        ({}, dict.fromkeys(NAMES, 0.5), (1,)),  # no clip arrives at a round factor
        ({}, dict.fromkeys(NAMES, 3.17), (1,)),  # nor does it enlarge
        (ALL_BY, dict.fromkeys(NAMES, 0.62), (0, 1)),  # two limits: nobody knows whose is right
    ],
)
def test_who_is_named_where_all_tensors_are_treated_otherwise(
    zero: dict[str, float], one: dict[str, float], culprits: tuple[int, ...]
) -> None:
    (finding,) = clipped(zero, one)
    assert finding.ranks == culprits
    assert top(finding) == "uneven_clipping"


@pytest.mark.parametrize(("factor_before", "culprit"), [(1.0, 0), (0.4, 1)])
def test_who_scales_alone_is_the_one_where_nobody_did_before(factor_before: float, culprit: int) -> None:
    (finding,) = clipped(ALL_BY, {}, factor_before=factor_before)
    assert (culprit,) == finding.ranks


def test_of_two_that_scale_the_one_that_does_as_all_did_before_is_sound() -> None:
    half, quarter = dict.fromkeys(NAMES, 0.5), dict.fromkeys(NAMES, 0.25)
    (finding,) = clipped(half, quarter, factor_before=0.5)
    assert (1,) == finding.ranks
    (finding,) = clipped(half, quarter)
    assert (0, 1) == finding.ranks


def test_a_step_at_which_nobody_reduces_is_no_uneven_clipping() -> None:
    classes = {"gradients_reduced": equal(8), "gradients": parted(9)}
    shown = view(8, {"gradients_reduced": SAME, "gradients": SAME}), view(9, {"gradients": TWO})
    (finding,) = judge(*shown, classes=classes, tables=given("gradients", 9, OTHER))
    assert "uneven_clipping" != top(finding)


def test_what_another_optimizer_holds_is_not_taken_for_unused() -> None:
    everyone = [*NAMES, "spare.weight"]
    known = {
        key: msgspec.structs.replace(t, names=everyone, fingerprints=[*t.fingerprints, 0], norms=[*t.norms, 0.0])
        for key, t in given("gradients_reduced", 0, OTHER).items()
    }
    told = census(*everyone)
    told.entries[-1] = msgspec.structs.replace(told.entries[-1], optimizer=1)
    (finding,) = judge(
        view(0, {"gradients_reduced": TWO}),
        classes={"gradients_reduced": parted(0)},
        tables=known,
        census={0: told, 1: told},
    )
    assert "gradient_sync_bypassed" == top(finding)


def test_a_result_that_is_gone_on_one_rank_once_is_a_bad_delivery() -> None:
    (finding,) = clipped({"b.weight": 0.0}, {})
    assert ((0,), "corrupted_collective") == (finding.ranks, top(finding))


def test_elements_that_one_rank_changes_without_scaling_name_it() -> None:
    """Small values are set to zero: the norms hardly move."""
    (finding,) = clipped({}, dict.fromkeys(NAMES, 1 - 1e-5))
    assert (1,) == finding.ranks


def test_a_tensor_that_was_not_read_at_the_reduction_accuses_nobody() -> None:
    (finding,) = clipped(dict.fromkeys(NAMES, 0.5), {}, unread="b.weight")
    assert (0,) == finding.ranks


def test_a_clip_that_all_ranks_apply_raises_nothing() -> None:
    assert clipped(ALL_BY, ALL_BY) == []


def test_it_asks_for_both_views_of_the_gradients() -> None:
    shown = view(8, {"gradients_reduced": SAME, "gradients": TWO})
    (asking,) = judge(shown, classes={"gradients_reduced": equal(8), "gradients": parted(8)})
    assert {request.tensor_class for request in asking.needs} == {"gradients", "gradients_reduced"}


# The optimizer.


def settings(step: int, *rates: float) -> dict[TableKey, Table]:
    names = ["optimizer0.group0.lr", "optimizer0.group0.weight_decay"]
    return {
        ("hyperparameters", step, rank): Table(
            tensor_class="hyperparameters",
            root=int(rate * 1e6),
            names=names,
            fingerprints=[int(rate * 1e6), 3],
            norms=[rate, 0.1],
        )
        for rank, rate in enumerate(rates)
    }


def test_a_learning_rate_that_changed_on_one_rank_is_laid_to_it_with_both_values() -> None:
    known = (
        settings(18, 0.001, 0.001)
        | settings(19, 0.001, 0.001)
        | settings(20, 0.001, 0.01)
        | given("parameters_after", 24, OTHER)
    )
    shown = view(20, {"hyperparameters": {1000: (0,), 10000: (1,)}}), view(24, {"parameters_after": TWO})
    classes = {"hyperparameters": parted(20), "gradients_reduced": equal(24), "parameters_after": parted(24)}
    (finding,) = judge(*shown, classes=classes, tables=known)
    assert (finding.ranks, finding.first_step) == ((1,), 20)
    assert top(finding) == "optimizer_state_mismatch"
    assert any("optimizer0.group0.lr is 0.001 on rank 0 and 0.01 on rank 1" in e.summary for e in finding.evidence)


@pytest.mark.parametrize(
    "rates",
    [
        ((0.001, 0.001), (0.00098, 0.00098), (0.0009604, 0.00094119)),  # multiplied once on rank 0, twice on rank 1
        ((0.001, 0.001), (0.0009, 0.0009), (0.0008, 0.0007)),
        ((0.0001, 0.0001), (0.0002, 0.0002), (0.0003, 0.0002)),  # rank 1's schedule stands still
    ],
)
def test_a_rate_that_left_its_schedule_on_one_rank_is_laid_to_it(rates: tuple[tuple[float, float], ...]) -> None:
    known = settings(13, *rates[0]) | settings(14, *rates[1]) | settings(15, *rates[2])
    shown = view(15, {"hyperparameters": {1: (0,), 2: (1,)}})
    (finding,) = judge(shown, classes={"hyperparameters": parted(15), "gradients_reduced": equal(15)}, tables=known)
    assert (finding.ranks, finding.first_step) == ((1,), 15)


def test_rates_that_differ_from_the_start_name_both_of_two_and_the_minority_of_three() -> None:
    classes = {"hyperparameters": parted(0), "gradients_reduced": equal(4)}
    two = view(0, {"hyperparameters": {1000: (0,), 10000: (1,)}})
    (finding,) = judge(two, classes=classes, tables=settings(0, 0.001, 0.01))
    assert finding.ranks == (0, 1)
    three = view(0, {"hyperparameters": {1000: (0, 2), 10000: (1,)}})
    (finding,) = judge(three, classes=classes, tables=settings(0, 0.001, 0.01, 0.001), ranks=3)
    assert finding.ranks == (1,)


def test_settings_of_ranks_that_train_parts_of_their_own_are_not_compared() -> None:
    told = census("a.weight")
    own = msgspec.structs.replace(told, entries=[*told.entries, entry("expert.weight", is_replicated=False)])
    shown = view(0, {"hyperparameters": {1000: (0,), 10000: (1,)}})
    assert judge(shown, classes={"hyperparameters": parted(0)}, census={0: own, 1: own}) == []


def test_moments_that_differ_alone_are_the_optimizers() -> None:
    known = given("optimizer_state", 0, {"b.weight": 8}) | given("parameters_after", 0, {"b.weight": 8})
    shown = view(0, {"parameters_before": SAME, "optimizer_state": TWO, "parameters_after": TWO})
    classes = {
        "parameters_before": parted(1),
        "gradients_reduced": equal(0),
        "parameters_after": parted(0),
        "optimizer_state": parted(0),
    }
    (finding,) = judge(shown, classes=classes, tables=known)
    assert top(finding) == "optimizer_state_mismatch"


# Rounding.


def test_replicas_that_part_by_rounding_drift() -> None:
    near = dict.fromkeys(NAMES, 1.0 + 3e-07)
    roots: Roots = {"gradients_reduced": TWO, "parameters_after": TWO}
    classes = {
        "parameters_before": parted(1),
        "gradients_reduced": parted(0, now=8),
        "parameters_after": parted(0, now=8),
    }
    known = given("gradients_reduced", 0, OTHER, sums=near, norms=near)
    known |= given("parameters_after", 0, OTHER, sums=near, norms=near)
    (finding,) = judge(view(0, roots), view(8, roots), classes=classes, tables=known)
    assert finding.facts["is_distance_tiny"] is True
    assert top(finding) == "nondeterministic_drift"


def test_gradients_that_part_by_rounding_after_the_reduction_drift() -> None:
    near = dict.fromkeys(NAMES, 1.0 + 3e-07)
    classes = {
        "parameters_before": parted(1),
        "gradients_reduced": equal(8),
        "gradients": parted(0, now=8),
        "parameters_after": parted(0, now=8),
    }
    roots: Roots = {"gradients_reduced": SAME, "gradients": TWO, "parameters_after": TWO}
    known = given("gradients", 0, OTHER, sums=near, norms=near) | given("gradients_reduced", 0, {})
    known |= given("parameters_after", 0, OTHER, sums=near, norms=near)
    (finding,) = judge(view(0, roots), view(8, roots), classes=classes, tables=known)
    assert top(finding) == "nondeterministic_drift"


@pytest.mark.parametrize(
    ("tensors", "cause"), [(("b.weight",), "corrupted_collective"), (NAMES, "optimizer_state_mismatch")]
)
def test_moments_that_part_with_the_weights_between_two_looks(tensors: tuple[str, ...], cause: str) -> None:
    changed = dict.fromkeys(tensors, 8)
    classes = {
        "parameters_before": parted(25),
        "gradients_reduced": equal(32),
        "parameters_after": parted(24),
        "optimizer_state": parted(32),
    }
    shown = (
        view(24, {"parameters_after": TWO}),
        view(25, {"parameters_before": TWO}),
        view(32, {"optimizer_state": TWO}),
    )
    past = {key: one for step in (16, 17, 23, 24) for key, one in given("parameters_after", step, changed).items()}
    past |= given("optimizer_state", 32, changed)
    (finding,) = judge(*shown, classes=classes, tables=past)
    assert not finding.needs
    assert top(finding) == cause


def test_one_moment_of_several_that_differs_is_the_optimizers_and_no_bad_delivery() -> None:
    classes = {"gradients_reduced": equal(32), "parameters_after": parted(28), "optimizer_state": parted(32)}
    classes["parameters_before"] = parted(29)
    shown = (
        view(28, {"parameters_after": TWO}),
        view(29, {"parameters_before": TWO}),
        view(32, {"optimizer_state": TWO}),
    )
    known = given("parameters_after", 28, {"b.weight": 8}) | given("parameters_after", 27, {})
    moments = ("b.weight.exp_avg", "b.weight.exp_avg_sq")
    for rank in (0, 1):
        known["optimizer_state", 32, rank] = Table(
            tensor_class="optimizer_state", root=rank, names=moments, fingerprints=[7 + rank, 7], norms=[1.0, 1.0]
        )
    (finding,) = judge(*shown, classes=classes, tables=known)
    assert (True, "optimizer_state_mismatch") == (finding.facts["is_one_moment_alone"], top(finding))


def test_weights_that_parted_between_two_looks_wait_for_the_moments() -> None:
    between = ClassHistory(
        0, is_equal_at_first=True, last_equal_step=24, first_unequal_step=28, num_equal=7, num_unequal=1
    )
    classes = {"parameters_after": between, "optimizer_state": equal(16)}
    known = given("parameters_after", 28, {"b.weight": 8}) | given("parameters_after", 24, {})
    shown = view(28, {"parameters_after": TWO})
    assert [] == judge(shown, classes=classes, tables=known, now_s=30)
    (finding,) = judge(shown, classes=classes, tables=known, now_s=60)
    assert not finding.needs


def test_weights_that_are_near_while_gradients_are_not_are_no_drift() -> None:
    near = dict.fromkeys(NAMES, 1.0 + 3e-07)
    roots: Roots = {"gradients_reduced": TWO, "parameters_after": TWO}
    classes = {
        "parameters_before": parted(1),
        "gradients_reduced": parted(0, now=8),
        "parameters_after": parted(0, now=8),
    }
    known = given("gradients_reduced", 0, OTHER, sums=dict.fromkeys(NAMES, 0.4))
    known |= given("parameters_after", 0, OTHER, sums=near, norms=near)
    (finding,) = judge(view(0, roots), view(8, roots), classes=classes, tables=known)
    assert top(finding) == "gradient_sync_bypassed"


def test_weights_without_low_bits_on_one_side_have_passed_through_a_narrower_dtype() -> None:
    known = given("parameters_before", 0, OTHER)
    known = {
        key: msgspec.structs.replace(t, marks=[Mark.ROUNDED * key[2]] * 3 + [Mark.CONSTANT]) for key, t in known.items()
    }
    classes = {"parameters_before": parted(0), "gradients_reduced": equal(4)}
    (finding,) = judge(view(0, {"parameters_before": TWO}), classes=classes, tables=known)
    assert finding.ranks == (1,)
    assert top(finding) == "precision_round_trip"


def test_a_sum_that_jumped_on_one_rank_breaks_the_tie_between_two_checks() -> None:
    classes = {"parameters_after": parted(24), "gradients_reduced": equal(24)}
    shown = view(24, {"parameters_after": TWO, "gradients_reduced": SAME})
    now = given("parameters_after", 24, {"b.weight": 8}, sums={"b.weight": 3.0})
    (asking,) = judge(shown, classes=classes, tables=now)
    assert asking.needs == tuple(TableRequest("parameters_after", step, (0, 1)) for step in (23, 22))
    then = {
        ("parameters_after", 23, rank): msgspec.structs.replace(
            table("parameters_after", 9, {}), sums=[0.99] * len(NAMES)
        )
        for rank in (0, 1)
    }
    lost = frozenset(("parameters_after", 22, rank) for rank in (0, 1))
    (finding,) = judge(shown, classes=classes, tables=now | then, unavailable=lost)
    assert finding.ranks == (1,)
    assert top(finding) == "silent_data_corruption"


@pytest.mark.parametrize(("sums", "ranks"), [((1.05, 1.12), (1,)), ((1.12, 1.05), (0,)), ((1.08, 1.12), (0, 1))])
def test_whose_step_leaves_the_way_of_the_one_before_has_the_damaged_moments(
    sums: tuple[float, float], ranks: tuple[int, ...]
) -> None:
    """All went from 0.9 to 0.96 and 1.0 by equal gradients; then one step was twice or three times as long."""
    classes = {
        "parameters_before": equal(24),
        "parameters_after": parted(24),
        "gradients": equal(24),
        "gradients_reduced": equal(24),
    }
    roots = {"parameters_after": TWO, "gradients": SAME, "gradients_reduced": SAME}
    known = {
        ("parameters_after", step, rank): msgspec.structs.replace(
            table("parameters_after", 9 + (step == 24) * rank, {"b.weight": 8} if step == 24 and rank else {}),
            sums=[sums[rank] if step == 24 and name == "b.weight" else before for name in NAMES],
        )
        for step, before in ((24, 1.0), (23, 1.0), (22, 0.96))
        for rank in (0, 1)
    }
    (finding,) = judge(view(24, roots), classes=classes, tables=known)
    assert (ranks, "optimizer_state_mismatch") == (finding.ranks, top(finding))


def test_tensors_too_small_to_be_marked_do_not_hide_that_one_side_was_rounded() -> None:
    known = given("parameters_before", 0, OTHER)
    marks = [0] + [Mark.ROUNDED] * (len(NAMES) - 1)
    known = {key: msgspec.structs.replace(t, marks=[mark * key[2] for mark in marks]) for key, t in known.items()}
    classes = {"parameters_before": parted(0), "gradients_reduced": equal(4)}
    small = msgspec.structs.replace(entry(NAMES[0]), shape=[5])
    whole = msgspec.structs.replace(census(*NAMES), entries=[small, *(entry(name) for name in NAMES[1:])])
    shown = view(0, {"parameters_before": TWO})
    (finding,) = judge(shown, classes=classes, tables=known, census={0: whole, 1: whole})
    assert top(finding) == "precision_round_trip"


def test_it_says_after_how_many_steps_the_weights_last_agreed() -> None:
    classes = {
        "parameters_before": equal(65),
        "parameters_after": replace(parted(128), last_equal_step=64),
    }
    shown = view(128, {"parameters_after": TWO})
    (finding,) = judge(shown, classes=classes, unavailable=frozenset(given("parameters_after", 128, {})))
    assert (128, 65) == (finding.first_step, finding.agreed_steps)
    moments = {"optimizer_state": replace(parted(128), last_equal_step=0), "parameters_after": equal(120)}
    shown = view(128, {"optimizer_state": TWO})
    lost = frozenset(("optimizer_state", step, rank) for step in (0, 128) for rank in (0, 1))
    (finding,) = judge(shown, classes=moments, unavailable=lost)
    assert 0 == finding.agreed_steps, "moments are read more rarely"


def test_replicas_that_never_agreed_have_no_state_that_is_good() -> None:
    lost = frozenset(("parameters_before", 0, rank) for rank in (0, 1))
    (finding,) = judge(view(0, {"parameters_before": TWO}), classes={"parameters_before": parted(0)}, unavailable=lost)
    assert -1 == finding.agreed_steps


def test_ranks_whose_models_differ_in_structure_are_left_to_another_detector() -> None:
    one = census("a.weight", "b.weight")
    two = msgspec.structs.replace(one, entries=[entry("a.weight"), entry("b.weight", requires_grad=False)])
    assert judge(flipped(), classes=FLIPPED, tables=FLIPPED_TABLES, census={0: one, 1: two}) == []
