"""Helpers for tests and benchmarks that compare an implementation with the definition.

check(tensor, row, bins, histogram="sampled")     # raises AssertionError that names the statistic
"""

import numpy as np
import torch

from holter_kernels.layout import FORMATS
from holter_kernels.reference import COUNTS, error_bound, summarize_one

EXTREMES = ("min", "max", "absmax", "absmin_nonzero")
SUMS = ("sum", "abs_sum", "square_sum")


def check_row(row: np.void, expected: np.void, dtype: torch.dtype) -> None:
    """Compare counts, fingerprint and extremes bit for bit, and sums within the bound."""
    for name in (*COUNTS, "fingerprint"):
        assert int(row[name]) == int(expected[name]), f"{name}: {row[name]} is not {expected[name]}"
    for name in EXTREMES:
        same = np.array_equal(row[name], expected[name], equal_nan=True)
        assert same, f"{name}: {row[name]!r} is not {expected[name]!r}"
    for name in SUMS:
        scale = float(expected["abs_sum"] if name == "sum" else expected[name])
        if np.isinf(scale):
            continue  # beyond float64 a sum is infinite or NaN, and says so by not being finite
        error = abs(float(row[name]) - float(expected[name]))
        allowed = error_bound(FORMATS[dtype], int(expected["numel"])) * scale
        assert error <= allowed, f"{name}: {row[name]!r} is {error} from {expected[name]!r}, allowed is {allowed}"


def check(
    tensor: torch.Tensor, row: np.void, bins: np.ndarray | None, *, offset: int = 0, histogram: str = "sampled"
) -> None:
    """Compare the row and histogram of one tensor with the reference."""
    expected, expected_bins = summarize_one(tensor, offset, histogram)
    check_row(row, expected, tensor.dtype)
    if expected_bins is None:
        assert bins is None, "a histogram that nobody asked for"
    else:
        assert bins is not None, "no histogram"
        wrong = np.flatnonzero(bins != expected_bins)
        assert not wrong.size, f"histogram differs in bins {wrong.tolist()}"


def from_bytes(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a dtype with exactly these bits; bool takes the last bit of each byte."""
    width = FORMATS[dtype].bits // 8
    array = np.frombuffer(raw[: len(raw) - len(raw) % width], np.uint8).copy()
    if not array.size:
        return torch.empty(0, dtype=dtype)
    tensor = torch.from_numpy(array)
    return (tensor & 1).view(dtype) if dtype is torch.bool else tensor.view(dtype)
