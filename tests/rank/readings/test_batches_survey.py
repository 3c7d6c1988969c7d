"""Statistics of a batch."""

import math

import pytest
import torch

from holter.rank.readings.batches import SMALL, survey


def numbers(**tensors: torch.Tensor) -> dict[str, float]:
    return dict(pair for entry in survey(list(tensors.items())) for pair in entry.numbers().items())


def test_range_and_mean_of_floats_and_integers():
    told = numbers(x=torch.tensor([[-3.0, 1.0], [2.0, 0.0]]), labels=torch.tensor([4, 0, 2]))
    assert {
        "min": -3.0,
        "max": 2.0,
        "mean": 0.0,
        "absmax": 3.0,
        "spread": pytest.approx(3.5**0.5),
        "is_constant": 0.0,
    } == {name.rpartition(".")[2]: number for name, number in told.items() if name.startswith("batch.x.")}
    assert (0.0, 4.0, 2.0) == tuple(told[f"batch.labels.{what}"] for what in ("min", "max", "mean"))


def test_a_large_tensor_is_read_in_one_pass_with_the_same_result():
    values = torch.randn(SMALL + 1)
    told = numbers(x=values, half=values.half())
    assert float(values.min()) == told["batch.x.min"]
    assert float(values.half().max()) == told["batch.half.max"]
    # Sums are rounded in proportion to the magnitudes, not to a mean that may be nearly zero.
    tolerance = 1e-6 * float(values.double().abs().mean())
    assert math.isclose(float(values.double().mean()), told["batch.x.mean"], rel_tol=0, abs_tol=tolerance)


def test_labels_that_are_all_equal_are_constant_and_one_alone_is_not():
    told = numbers(same=torch.full((8,), 3), one=torch.tensor([3]), images=torch.zeros(8, 2, dtype=torch.uint8))
    assert (1.0, 0.0, 1.0) == tuple(told[f"batch.{name}.is_constant"] for name in ("same", "one", "images"))


def test_the_range_is_of_what_is_finite_and_the_rest_is_counted():
    (found,) = survey([("x", torch.tensor([1.0, math.inf, 3.0, math.nan]))])
    assert (1.0, 3.0, 2.0, 1, 1) == (found.low, found.high, found.mean, found.nans, found.infs)
    (found,) = survey([("x", torch.full((4,), math.nan))])
    assert {} == dict(found.numbers())


def test_kinds_without_a_range_are_left_out():
    kinds = [torch.empty(0), torch.ones(3, dtype=torch.bool), torch.eye(2).to_sparse(), torch.ones(2, device="meta")]
    assert [] == survey([("x", tensor) for tensor in kinds])


def test_many_integers_are_sampled():
    tokens = torch.arange(3 << 20)
    (found,) = survey([("tokens", tokens)])
    assert 0.0 == found.low
    assert found.high > 0.99 * float(tokens[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_the_native_look_says_what_torch_says(dtype: torch.dtype):
    values = (torch.arange(300, dtype=torch.float64).sub(77).mul(1.5)).to(dtype).reshape(30, 10)
    # What does not lie densely is left to torch.
    native, by_torch = (numbers(x=each) for each in (values, values.t()))
    assert by_torch == {name: pytest.approx(number, rel=1e-6) for name, number in native.items()}
    assert float(values.double().std(correction=0)) == pytest.approx(native["batch.x.spread"], rel=1e-12)


def test_what_is_not_finite_is_counted_after_all():
    told = survey([("x", torch.tensor([1.0, float("nan"), float("-inf"), 3.0]))])
    assert [(1, 1, 1.0, 3.0)] == [(each.nans, each.infs, each.low, each.high) for each in told]
