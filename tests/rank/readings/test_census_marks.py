"""What is odd about values, and progressions that a cast has rounded."""

import pytest
import torch

from holter.rank.readings.census import DtypeTraits, marks, progression
from holter.records import Mark
from holter_kernels import summarize


def of(tensor: torch.Tensor) -> int:
    return int(marks(summarize([tensor], histogram="off"), DtypeTraits.of([tensor.dtype]))[0])


def rotary(width: int = 64) -> torch.Tensor:
    return 1.0 / 10000.0 ** (torch.arange(0, width, 2).float() / width)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.linspace(-0.987, 1.123, 100), 0),
        (torch.ones(8), Mark.CONSTANT),
        (torch.ones(1), 0),
        (torch.zeros(8), Mark.CONSTANT | Mark.ZERO),
        (torch.tensor([1.1, float("nan")]), Mark.NONFINITE),
        (torch.linspace(-1, 1, 100).bfloat16().float(), Mark.ROUNDED),
        (torch.linspace(-1, 1, 100).bfloat16(), 0),
        (torch.linspace(-1, 1, 100) * 1e30, Mark.HUGE),
        (torch.full((100,), 1e-40).cumsum(0), Mark.HUGE),
        (torch.tensor([10_000_000, 3]), 0),
    ],
)
def test_a_tensor_is_marked_for_what_is_odd_about_it(tensor, expected):
    assert expected == of(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_frequencies_are_geometric_also_after_a_cast(dtype):
    assert "geometric" == progression(rotary().to(dtype))[0]


def test_frequencies_that_went_through_a_narrow_dtype_are_still_known():
    assert "geometric" == progression(rotary().bfloat16().float())[0]


def test_positions_are_arithmetic_even_where_a_cast_made_them_equal():
    positions = torch.arange(2048).float()
    assert ("arithmetic", 2048) == progression(positions)
    kind, num_distinct = progression(positions.bfloat16())
    assert "arithmetic" == kind
    assert num_distinct < 1000
    assert ("arithmetic", 16) == progression(torch.arange(16).expand(1, -1))


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(16), torch.rand(16, generator=torch.Generator().manual_seed(0)), torch.rand(4, 4), torch.ones(3)],
)
def test_other_buffers_are_no_progression(buffer):
    assert "" == progression(buffer)[0]


def test_a_large_buffer_is_not_looked_at():
    assert ("", -1) == progression(torch.arange(100_000))
