"""What a comparison tells of its rows: the native code says what the definition in numpy says."""

import math

import numpy as np
import pytest
import torch

from holter.rank.readings.census import DtypeTraits, Selection
from holter.rank.readings.comparison import FingerprintRows
from holter_kernels import summarize

pytest.importorskip("holter.rank._rows")

ODD = {
    "ordinary": torch.randn(40, generator=torch.Generator().manual_seed(1)),
    "not finite": torch.tensor([1.0, math.nan, math.inf, -math.inf]),
    "all NaN": torch.full((3,), math.nan),
    "zeros": torch.zeros(5),
    "constant": torch.full((7,), 0.1),
    "one element": torch.ones(1),
    "empty": torch.zeros(0),
    "huge": torch.tensor([1.0, -2e6]),
    "overflows float32 when squared": torch.full((4,), 3e38),
    "subnormal": torch.full((50,), 1e-40),
    "half, often subnormal": torch.full((50,), 1e-6, dtype=torch.float16),
    "rounded to bfloat16": torch.arange(1, 40).bfloat16().float(),
    "double": torch.randn(20, generator=torch.Generator().manual_seed(2)).double(),
    "bfloat16": torch.randn(20, generator=torch.Generator().manual_seed(3)).bfloat16(),
    "integers": torch.arange(30),
    "flags": torch.tensor([True, False]),
}


def rows_of(tensors: list[torch.Tensor], places: list[int]) -> FingerprintRows:
    traits = DtypeTraits.of([tensor.dtype for tensor in tensors])
    return FingerprintRows(np.array(places, dtype=np.int64), summarize(tensors, histogram="off").rows, traits)


def assert_same(rows: FingerprintRows, chosen: Selection) -> None:
    native, numpy = rows.told(chosen.size, chosen.places), rows.told_by_numpy(chosen.size, chosen.places)
    assert numpy[:5] == native[:5]
    # Added up in another order.
    assert numpy[5:] == pytest.approx(native[5:], rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("what", ODD)
def test_marks_norms_and_roots_of_odd_values_are_those_of_the_definition(what: str) -> None:
    assert_same(rows_of([ODD[what]], [2]), Selection(4, np.array([1, 2]), []))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 148, 1024, 1025, 1100])
def test_roots_over_any_number_of_tensors_are_those_of_the_definition(size: int) -> None:
    tensors = [torch.full((1 + place % 3,), float(place)) for place in range(size)]
    assert_same(rows_of(tensors, list(range(size))), Selection(size, np.arange(size), []))
    some = list(range(0, size, 3))
    assert_same(rows_of([tensors[place] for place in some], some), Selection(size, np.arange(0, size, 2), []))


def test_nothing_chosen_has_a_root_too() -> None:
    assert_same(rows_of([torch.ones(2)], [0]), Selection(1, np.zeros(0, dtype=np.int64), []))


def test_parts_are_joined_as_one_reading_of_all() -> None:
    tensors = list(ODD.values())
    whole = rows_of(tensors, list(range(len(tensors))))
    parts = [
        rows_of(tensors[::2], list(range(0, len(tensors), 2))),
        rows_of(tensors[1::2], list(range(1, len(tensors), 2))),
    ]
    chosen = np.arange(len(tensors))
    assert whole.told(len(tensors), chosen)[:5] == FingerprintRows.joined(parts, chosen).told(len(tensors), chosen)[:5]


def test_a_place_beyond_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        rows_of([torch.ones(2)], [3]).told(3, np.arange(3))
