"""Fires on frequencies in bf16 and on tables that were lost; quiet on statistics, masks, caches and one rank's own trouble."""

import pytest

from holter.diagnosis import top_cause
from holter.faults.precision.buffer_values import BufferValues, num_told_apart
from holter.records import Census, Finding, Mark, TensorEntry
from made_up import made_window


def buffer(name: str, dtype: str = "bfloat16", *, shape: tuple[int, ...] = (16,), kind: str = "Attention", persistent: bool = False, marks: int = 0, pattern: str = "", distinct: int = -1) -> TensorEntry:  # fmt: skip
    return TensorEntry(
        name, shape, dtype, False, True, -1,
        module_class=kind, is_persistent=persistent, marks=marks, pattern=pattern, num_distinct=distinct,
    )  # fmt: skip


def judge(*of_ranks: list[TensorEntry], world_size: int = 2) -> list[Finding]:
    lists = of_ranks if len(of_ranks) > 1 else of_ranks * world_size
    census = {
        rank: Census(model=0, wrapper="", is_replicated=True, optimizers=[], backward_order=[], part=0, parts=1, entries=entries)
        for rank, entries in enumerate(lists)
    }  # fmt: skip
    window = made_window(now_ns=0, world_size=world_size, attached=frozenset(census), census=census)
    return list(BufferValues().judge(window))


def test_bf16_tells_641_of_2048_positions_apart() -> None:
    assert num_told_apart("bfloat16") == 641
    assert num_told_apart("float16") == 2048


def test_rotary_frequencies_in_bf16_are_found() -> None:
    (finding,) = judge([buffer("attention.inv_freq", pattern="geometric", distinct=16)])
    assert (finding.severity, finding.tensors, finding.ranks) == ("warning", ("attention.inv_freq",), (0, 1))
    assert top_cause(finding) == "buffer_precision_loss"
    assert any("641 of the positions 0 to 2047" in one.summary for one in finding.evidence)


@pytest.mark.parametrize(
    "entry",
    [
        buffer("rope.table", pattern="geometric"),
        buffer("times", pattern="arithmetic", shape=(1000,), distinct=385),
        buffer("rotary.freqs", "float16"),
    ],
    ids=lambda entry: entry.name,
)
def test_other_progressions_and_names_are_found(entry: TensorEntry) -> None:
    (finding,) = judge([entry])
    assert top_cause(finding) == "buffer_precision_loss"


@pytest.mark.parametrize(
    "entry",
    [
        buffer("attention.inv_freq", "float32", pattern="geometric"),
        buffer("bn.running_mean", kind="BatchNorm2d", persistent=True, marks=int(Mark.ZERO | Mark.CONSTANT)),
        buffer("bn.running_var", kind="BatchNorm2d", persistent=True, marks=int(Mark.CONSTANT)),
        buffer("attention.causal_mask", marks=int(Mark.NONFINITE)),
        buffer("mask", "bool", marks=int(Mark.CONSTANT)),
        buffer("embeddings.token_type_ids", "int64", marks=int(Mark.ZERO | Mark.CONSTANT)),
        buffer("embeddings.position_ids", "int64", pattern="arithmetic", distinct=16),
        buffer("attention.k_cache", marks=int(Mark.ZERO)),
        buffer("rope.cos_cached", shape=(64, 16)),
        buffer("rope.cos_cached", shape=(1, 16), marks=int(Mark.CONSTANT)),
        buffer("alibi.slopes", pattern="geometric"),
        buffer("grid", pattern="arithmetic", distinct=16),
        buffer("pe", "float32", shape=(64, 16), kind="PositionalEncoding"),
    ],
    ids=lambda entry: f"{entry.name}-{entry.dtype}",
)
def test_what_is_narrow_or_constant_by_nature_is_healthy(entry: TensorEntry) -> None:
    assert judge([entry]) == []


@pytest.mark.parametrize(
    "entry",
    [
        buffer("rotary.inv_freq", "float32", marks=int(Mark.ZERO | Mark.CONSTANT)),
        buffer("rotary.inv_freq", "float32", marks=int(Mark.NONFINITE)),
        buffer("embeddings.position_ids", "int64", marks=int(Mark.ZERO | Mark.CONSTANT)),
        buffer("rope.sin", "float32", shape=(64, 16), marks=int(Mark.CONSTANT)),
        buffer("table", "float32", kind="RotaryEmbedding", marks=int(Mark.HUGE)),
    ],
    ids=lambda entry: f"{entry.name}-{entry.marks}",
)
def test_a_table_that_was_lost_in_loading_is_found(entry: TensorEntry) -> None:
    (finding,) = judge([entry])
    assert finding.tensors == (entry.name,)
    assert top_cause(finding) == "lost_buffer"
    assert "no state dict holds it" in finding.evidence[0].summary


def test_a_table_that_one_rank_lost_is_for_the_comparison_of_ranks() -> None:
    lost = buffer("rotary.inv_freq", "float32", marks=int(Mark.ZERO))
    assert judge([lost], [buffer("rotary.inv_freq", "float32")]) == []


def test_it_waits_for_every_rank() -> None:
    census = Census(model=0, wrapper="", is_replicated=True, optimizers=[], backward_order=[], part=0, parts=1, entries=[buffer("inv_freq")])  # fmt: skip
    late = made_window(now_ns=0, world_size=2, attached=frozenset({0}), census={0: census})
    assert list(BufferValues().judge(late)) == []
