"""The native code against the definition: every instruction set, every dtype, random bits, results poisoned beforehand."""

import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holter_kernels import Pass, native, summarize
from holter_kernels.layout import FORMATS, ROW
from holter_kernels.plan import CHUNK
from holter_kernels.reference import summarize_one
from holter_kernels.testing import check, check_row, from_bytes

DTYPES = list(FORMATS)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def poisoned(tensors: list[torch.Tensor], histogram: str) -> tuple[np.ndarray, np.ndarray | None]:
    """A pass whose results were all ones before: NaN as floats, impossible as counts."""
    empty = np.empty

    def filled(*args: object, **kwargs: object) -> np.ndarray:
        memory = empty(*args, **kwargs)
        memory.view(np.uint8)[...] = 0xFF
        return memory

    with mock.patch.object(np, "empty", filled):
        table = Pass(tensors, histogram).start(tensors).poll()
    return np.array(list(table), ROW), table.histogram


def run_chunks(chunks: np.ndarray, rows: np.ndarray, *, num_threads: int, partials: np.ndarray | None = None) -> None:
    """The native pass over a table of one row made by hand, each chunk a job."""
    edges = np.arange(len(chunks) + 1, dtype=np.uint64)
    plan = SimpleNamespace(chunks=chunks, first_chunk=edges[[0, -1]], jobs=edges, bases=np.zeros(1, np.uint64))
    memory = np.empty(len(chunks), ROW) if partials is None else partials
    native.run(plan, rows, None, memory, statistics=True, sampled=False, num_threads=num_threads)


def agree(tensors: list[torch.Tensor], histogram: str) -> None:
    rows, bins = poisoned(tensors, histogram)
    for k, tensor in enumerate(tensors):
        check(tensor, rows[k], None if bins is None else bins[k], histogram=histogram)


@pytest.mark.usefixtures("instruction_set")
@given(
    raws=st.lists(st.binary(max_size=600), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    histogram=st.sampled_from(["off", "sampled", "exact"]),
)
@settings(max_examples=150)
def test_random_bits(raws: list[bytes], dtype: torch.dtype, histogram: str) -> None:
    agree([from_bytes(raw, dtype) for raw in raws], histogram)


@pytest.mark.usefixtures("instruction_set")
@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(0, 200_000),
    dtype=st.sampled_from(DTYPES),
    log_scale=st.floats(-46, 39),
    share_special=st.sampled_from([0.0, 1e-4, 0.3, 1.0]),
)
@settings(max_examples=60)
def test_many_blocks_of_any_magnitude(
    seed: int, numel: int, dtype: torch.dtype, log_scale: float, share_special: float
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(numel) * 10.0**log_scale
    special = rng.random(numel) < share_special
    x[special] = rng.choice([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, -1e-45], special.sum())
    if not FORMATS[dtype].is_float:
        x = np.nan_to_num(np.clip(x, -(2.0**30), 2.0**30), posinf=1, neginf=0)
    agree([torch.from_numpy(x).to(dtype)], "sampled")


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 2, 7, 31, 63, 1023, 1024, 1025, 65535, 65537])
def test_every_edge_of_a_vector_a_block_and_a_chunk(dtype: torch.dtype, numel: int) -> None:
    raw = np.random.default_rng(numel).bytes(numel * FORMATS[dtype].bits // 8)
    agree([from_bytes(raw, dtype)], "exact")


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_pattern_of_the_small_formats(dtype: torch.dtype) -> None:
    if dtype is torch.float32:
        every = torch.arange(1 << 16, dtype=torch.int32).mul(1 << 16).view(dtype)  # every sign, exponent, high mantissa
    else:
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    agree([every, every.flip(0)], "exact")


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8], ids=str)
def test_every_byte(dtype: torch.dtype) -> None:
    agree([torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)], "exact")


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("misalignment", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
def test_memory_at_any_address(dtype: torch.dtype, misalignment: int) -> None:
    width = FORMATS[dtype].bits // 8
    raw = np.random.default_rng(0).integers(0, 256, 3001 * width + 8, dtype=np.uint8)
    view = raw[misalignment : misalignment + 3001 * width]
    chunks = np.array([(view.ctypes.data, 3001, 0, 0, FORMATS[dtype].code)], CHUNK)
    rows = np.empty(1, ROW)
    run_chunks(chunks, rows, num_threads=1)
    check(from_bytes(view.tobytes(), dtype), rows[0], None, histogram="off")


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("exponent", [-130, -126, -120, -100, -60, 0, 60, 100, 126])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_keep_their_bound_at_extreme_magnitudes(dtype: torch.dtype, exponent: int) -> None:
    x = (torch.rand(10_000, dtype=torch.float64) * 2.0**exponent).to(dtype)
    row = next(iter(summarize([x])))
    expected, _ = summarize_one(x)
    assert expected["square_sum"] > 0
    check_row(row, expected, dtype)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_keep_their_bound_over_two_billion_elements(dtype: torch.dtype) -> None:
    """65,536 elements read again and again: as many additions as 2**31 elements need, without their memory."""
    times = 1 << 15
    x = torch.rand(1 << 16).to(dtype)
    chunks = np.zeros(times, CHUNK)
    chunks["address"], chunks["count"], chunks["code"] = x.data_ptr(), 1 << 16, FORMATS[dtype].code
    rows = np.empty(1, ROW)
    run_chunks(chunks, rows, num_threads=2)
    expected, _ = summarize_one(x)
    assert int(rows[0]["numel"]) == times << 16
    for name in ("sum", "abs_sum", "square_sum"):
        assert abs(rows[0][name] / times - expected[name]) <= 260 * 2.0**-24 * expected[name]


def test_instruction_sets_agree_on_every_integer() -> None:
    x = [torch.randn(70_001).to(dtype) for dtype in DTYPES]
    before, found = native.instruction_set(), []
    for name in native.available():
        native.select(name)
        table = summarize(x)
        found.append((table.fingerprint.tolist(), table.min.tolist(), table.max.tolist(), table.histogram.tolist()))
    native.select(before)
    assert all(one == found[0] for one in found)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("flush", [False, True])
def test_the_callers_treatment_of_subnormals_neither_matters_nor_changes(flush: bool) -> None:  # noqa: FBT001
    tiny = torch.tensor([1e-40, 2e-40] * 600)
    if not torch.set_flush_denormal(flush):
        pytest.skip("this processor cannot flush subnormals")
    try:
        table = summarize([tiny, tiny.to(torch.float64), tiny.bfloat16()])
        after = (tiny[:1] * 1.0).item()
    finally:
        torch.set_flush_denormal(False)
    assert (after == 0.0) is flush
    assert [1200, 0, 1200] == table.subnormals.tolist()
    assert table.square_sum[0] == pytest.approx(600 * (1e-80 + 4e-80), rel=1e-4)
    check(tiny, next(iter(table)), table.histogram[0])


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no instruction set pentium"):
        native.select("pentium")


def test_buffers_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        run_chunks(np.zeros(2, CHUNK), np.zeros(1, ROW), num_threads=1, partials=np.zeros(1, ROW))
