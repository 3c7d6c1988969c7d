"""The definition against worked examples and against torch, which knows nothing of it."""

import math

import numpy as np
import pytest
import torch

from holter_kernels.layout import FORMATS, bits_of
from holter_kernels.reference import combine, statistics, summarize_one

FLOATS = [dtype for dtype, fmt in FORMATS.items() if fmt.is_float]
SPECIAL = [0.0, -0.0, 1.0, -2.0, 3.5, math.inf, -math.inf, math.nan, 1e-3, -448.0]


def test_the_worked_example() -> None:
    row, bins = summarize_one(torch.tensor([0.0, -2.0, 3.0, math.inf]), histogram="exact")
    found = {name: row[name].item() for name in row.dtype.names}
    expected = {
        "numel": 4, "zeros": 1, "subnormals": 0, "nans": 0, "pos_infs": 1, "neg_infs": 0, "low_mantissa_zero": 4,
        "min": -2.0, "max": 3.0, "absmax": 3.0, "absmin_nonzero": 2.0, "sum": 1.0, "abs_sum": 5.0, "square_sum": 13.0,
    }  # fmt: skip
    assert expected == {name: found[name] for name in expected}
    assert {0: 1, 128: 2, 255: 1} == {int(e): int(bins[e]) for e in np.flatnonzero(bins)}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_agrees_with_torch_on_every_kind_of_value(dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    wide = x.to(torch.float64)
    finite = wide[torch.isfinite(wide)]
    row, _ = summarize_one(x)
    expected = {
        "nans": torch.isnan(wide).sum(), "pos_infs": torch.isposinf(wide).sum(), "neg_infs": torch.isneginf(wide).sum(),
        "zeros": (wide == 0).sum(), "min": finite.min(), "max": finite.max(), "absmax": finite.abs().max(),
        "absmin_nonzero": finite[finite != 0].abs().min(), "sum": finite.sum(), "abs_sum": finite.abs().sum(),
        "square_sum": finite.square().sum(),
    }  # fmt: skip
    assert {name: value.item() for name, value in expected.items()} == {name: row[name].item() for name in expected}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_subnormals_are_what_lies_below_the_smallest_normal(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = torch.tensor([info.smallest_normal], dtype=torch.float64)
    x = torch.cat([smallest, smallest / 2, -smallest / 2, smallest * 0]).to(dtype)
    row, bins = summarize_one(x, histogram="exact")
    assert (2, 1, 3) == (row["subnormals"], row["zeros"], bins[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_bin_of_a_power_of_two_is_its_exponent(dtype: torch.dtype) -> None:
    for exponent in (-5, 0, 3):
        _, bins = summarize_one(torch.tensor([2.0**exponent]).to(dtype), histogram="exact")
        assert [127 + exponent] == np.flatnonzero(bins).tolist()


def test_float64_beyond_float32_goes_to_the_outermost_bins() -> None:
    _, bins = summarize_one(torch.tensor([1e300, 1e-300], dtype=torch.float64), histogram="exact")
    assert [1, 254] == np.flatnonzero(bins).tolist()


@pytest.mark.parametrize(
    ("dtype", "smaller"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)], ids=["float64", "float32"]
)
def test_low_mantissa_zero_counts_what_survives_the_smaller_format(dtype: torch.dtype, smaller: torch.dtype) -> None:
    x = torch.linspace(0.1, 0.9, 1000, dtype=dtype)
    survived = x.to(smaller).to(dtype)
    assert summarize_one(survived)[0]["low_mantissa_zero"] == 1000
    assert summarize_one(x)[0]["low_mantissa_zero"] == int((x == survived).sum())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.int8, torch.int16], ids=str)
def test_integers_have_extremes_and_sums_and_no_exponents(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    row, bins = summarize_one(x)
    assert (2, 0.0, 1.0, 1.0, 3.0) == tuple(row[k] for k in ("zeros", "min", "max", "absmin_nonzero", "sum"))
    assert (0, 0, 0) == (row["nans"], row["low_mantissa_zero"], bins.sum())


def test_nothing_finite_has_no_extremes() -> None:
    for x in (torch.empty(0), torch.tensor([math.nan, math.inf])):
        row, _ = summarize_one(x)
        assert all(math.isnan(row[name]) for name in ("min", "max", "absmax", "absmin_nonzero"))
        assert row["sum"] == row["abs_sum"] == row["square_sum"] == 0


def test_only_every_sixteenth_block_is_sampled() -> None:
    x = torch.ones(20_000)
    x[1024 : 16 * 1024] = 4.0
    _, sampled = summarize_one(x)
    _, exact = summarize_one(x, histogram="exact")
    assert {127: 2 * 1024} == {int(e): int(sampled[e]) for e in np.flatnonzero(sampled)}  # blocks 0 and 16
    assert {127: 20_000 - 15 * 1024, 129: 15 * 1024} == {int(e): int(exact[e]) for e in np.flatnonzero(exact)}


def test_pieces_combine_to_the_whole() -> None:
    x = torch.randn(5000, dtype=torch.bfloat16)
    fmt, bits = FORMATS[x.dtype], bits_of(x)
    whole, bins = statistics(fmt, bits, 0, "exact")
    parts, part_bins = combine([(fmt, bits[:1777], 0), (fmt, bits[1777:], 1777)], "exact")
    for name in whole.dtype.names:
        assert whole[name] == pytest.approx(parts[name], rel=1e-12)
    assert whole["fingerprint"] == parts["fingerprint"]
    assert (bins == part_bins).all()
