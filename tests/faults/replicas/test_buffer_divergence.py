"""Fires on buffers that part while parameters agree; quiet where the wrapper broadcasts them, or the parameters parted first."""

from collections.abc import Mapping

from holter.diagnosis import rank_causes
from holter.faults import ClassHistory, StepView, TableKey
from holter.faults.replicas.buffer_divergence import BufferDivergence
from holter.records import Census, Finding, Table, TableRequest, TensorEntry
from made_up import made_window

NAMES = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
TWO = {11: (0,), 22: (1,)}
SAME = {5: (0, 1)}


def history(first_unequal: int | None, num_unequal: int = 0) -> ClassHistory:
    return ClassHistory(0, first_unequal != 0, None if first_unequal == 0 else 0, first_unequal, 3, num_unequal)


def table(rank: int, step: int, root: int, *fingerprints: int) -> dict[TableKey, Table]:
    told = Table(tensor_class="buffers", root=root, names=NAMES, fingerprints=list(fingerprints), norms=[1.0, 2.0, 3.0])
    return {("buffers", step, rank): told}


def tables(moved: tuple[int, ...] = (0, 1)) -> dict[TableKey, Table]:
    """Equal at step 0; at step 1 those of these ranks have moved, each to values of its own."""
    now = {rank: (7 + rank, 9 + rank, 4) if rank in moved else (1, 2, 4) for rank in (0, 1)}
    return {
        key: told
        for rank in (0, 1)
        for known in (table(rank, 0, 5, 1, 2, 4), table(rank, 1, 11 * (rank + 1), *now[rank]))
        for key, told in known.items()
    }


def judge(
    classes: dict[str, ClassHistory],
    known: dict[TableKey, Table] | None = None,
    later: Mapping[int, tuple[int, ...]] = TWO,
    census: Census | None = None,
) -> list[Finding]:
    views = (StepView(1, 0, 2, (), roots={"buffers": TWO}), StepView(8, 0, 2, (), roots={"buffers": later}))
    told = {0: census, 1: census} if census else {}
    window = made_window(
        10**12,
        2,
        frozenset({0, 1}),
        steps=views,
        classes=classes,
        tables=tables() if known is None else known,
        census=told,
    )
    return list(BufferDivergence().judge(window))


AGREED = history(None)


def test_statistics_that_part_while_parameters_agree() -> None:
    (finding,) = judge({"buffers": history(1, 2), "parameters_before": AGREED, "gradients": AGREED})
    assert finding.severity == "warning"
    assert finding.tensors == ("norm.running_mean", "norm.running_var")
    assert finding.ranks == (0, 1)
    assert finding.first_step == 1
    cause = rank_causes(finding)[0]
    assert (cause.cause, cause.confidence) == ("buffer_divergence", 0.93)
    assert any("differed at 2 of 5 comparisons" in e.summary for e in finding.evidence)


def test_it_asks_for_the_tables_first() -> None:
    (finding,) = judge({"buffers": history(1, 2), "parameters_before": AGREED}, known={})
    assert finding.needs == (TableRequest("buffers", 1, (0, 1)), TableRequest("buffers", 0, (0, 1)))


def test_a_rank_on_which_alone_they_changed_is_named() -> None:
    (finding,) = judge({"buffers": history(1, 2), "parameters_before": AGREED}, known=tables(moved=(1,)))
    assert finding.ranks == (1,)
    assert any("changed on rank 1 alone" in one.summary for one in finding.evidence)


def test_buffers_that_the_wrapper_makes_equal_again_raise_nothing() -> None:
    assert judge({"buffers": history(1, 2)}, later=SAME) == []


def test_one_comparison_is_not_enough() -> None:
    assert judge({"buffers": history(1, 1)}) == []


def test_buffers_that_follow_the_parameters_raise_nothing() -> None:
    assert judge({"buffers": history(1, 2), "parameters_before": history(0, 3)}) == []
    assert judge({"buffers": history(1, 2), "gradients_reduced": history(1, 3)}) == []


def test_buffers_that_are_local_by_intention_raise_nothing() -> None:
    entries = [TensorEntry(name, (4,), "float32", False, True, -1, is_replicated=False) for name in NAMES]
    census = Census(
        model=0, wrapper="DDP", is_replicated=True, optimizers=[], backward_order=[], part=0, parts=1, entries=entries
    )
    assert judge({"buffers": history(1, 2)}, census=census) == []


def test_a_table_of_another_dtype_on_one_rank_is_named_so() -> None:
    def census(dtype: str) -> Census:
        entries = [TensorEntry(name, (4,), dtype, False, True, -1, is_replicated=True) for name in NAMES]
        return Census(
            model=0, wrapper="DDP", is_replicated=True, optimizers=[], backward_order=[], part=0, parts=1, entries=entries
        )  # fmt: skip

    classes = {"buffers": history(1, 2), "parameters_before": AGREED, "gradients": AGREED}
    views = (StepView(1, 0, 2, (), roots={"buffers": TWO}), StepView(8, 0, 2, (), roots={"buffers": TWO}))
    told = {0: census("float32"), 1: census("bfloat16")}
    window = made_window(10**12, 2, frozenset({0, 1}), steps=views, classes=classes, tables=tables(), census=told)
    (finding,) = BufferDivergence().judge(window)
    assert rank_causes(finding)[0].cause == "dtype_mismatch_across_ranks"
    assert "float32 on rank 0 and bfloat16 on rank 1" in finding.evidence[0].summary
