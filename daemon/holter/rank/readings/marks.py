"""What is odd about a tensor's values, from the statistics of one pass; and whether a small buffer is a progression.

    inv_freq     1.0, 0.1, 0.01, …      geometric      as rotary embeddings have it
    positions    0, 1, 2, 3, …          arithmetic

A progression is one within what rounding explains, so that it is still known as such after a cast to a narrower dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holter.records import Mark

HUGE = 1e6
NEARLY_ALL = 0.99
MANY_SUBNORMALS = 0.01
MIN_ROUNDED = 16
"""A few values may well be short by chance: ones, halves."""
MAX_ELEMENTS = 65_536
"""Of a buffer that is looked at element by element."""
MIN_TERMS = 4
MIN_RANGE = 1.5
"""Of the ends of a geometric progression: what hardly grows may be any progression."""
MAX_BYTES = 1 << 30
"""Of all tensors that one census reads."""

WIDE = (torch.float32, torch.float64)
ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20, torch.float64: 2.0**-20}
"""Of one value; generous for the wide ones, whose values were computed, in float32 most often."""


@dataclass(frozen=True)
class Kinds:
    """What the dtypes of a list of tensors mean for their marks."""

    is_wide: np.ndarray
    is_float: np.ndarray
    is_normal: np.ndarray
    """A float that is not often subnormal: float16 begins to be at 6e-5."""

    @staticmethod
    def of(dtypes: Sequence[torch.dtype]) -> "Kinds":
        """Of tensors of these dtypes."""
        is_float = np.array([dtype.is_floating_point for dtype in dtypes], dtype=bool)
        is_half = np.array([dtype is torch.float16 for dtype in dtypes], dtype=bool)
        return Kinds(np.array([dtype in WIDE for dtype in dtypes], dtype=bool), is_float, is_float & ~is_half)


def marks(table: Any, kinds: Kinds) -> np.ndarray:
    """`Mark`s of each tensor of a pass, uint8."""
    numel, zeros = table.numel.astype(np.float64), table.zeros.astype(np.float64)
    nonzeros = numel - zeros
    is_bad = table.nans + table.pos_infs + table.neg_infs > 0
    is_constant = (numel > 1) & (table.min == table.max) & ~is_bad
    is_short = (table.low_mantissa_zero - zeros >= NEARLY_ALL * nonzeros) & (nonzeros >= MIN_ROUNDED)
    is_huge = kinds.is_float & (table.absmax > HUGE) | kinds.is_normal & (table.subnormals > MANY_SUBNORMALS * numel)
    found = is_constant * np.uint8(Mark.CONSTANT)
    found |= ((numel > 0) & (nonzeros == 0)) * np.uint8(Mark.ZERO)
    found |= is_bad * np.uint8(Mark.NONFINITE)
    found |= (kinds.is_wide & ~is_constant & is_short) * np.uint8(Mark.ROUNDED)
    found |= is_huge * np.uint8(Mark.HUGE)
    return np.asarray(found, dtype=np.uint8)


def progression(buffer: torch.Tensor) -> tuple[str, int]:
    """`geometric`, `arithmetic` or nothing, and the number of different values; -1: too large, or on a device."""
    if buffer.device.type != "cpu" or not 0 < buffer.numel() <= MAX_ELEMENTS or buffer.is_complex():
        return "", -1
    values = buffer.detach().to(torch.float64).reshape(-1).numpy()
    num_distinct = len(np.unique(values))
    is_line = sum(size > 1 for size in buffer.shape) == 1
    if not is_line or values.size < MIN_TERMS or not np.isfinite(values).all() or values[0] == values[-1]:
        return "", num_distinct
    roundoff = ROUNDOFF.get(buffer.dtype, 0.0)
    if buffer.dtype in WIDE and _is_short(buffer):
        roundoff = ROUNDOFF[torch.bfloat16]
    if _is_line(values, tolerance=2 * roundoff * float(np.abs(values).max()) + 1e-12):
        return "arithmetic", num_distinct
    # Three values are rounded: the term and both ends.
    if values.min() > 0 and values.max() / values.min() > MIN_RANGE and _is_line(np.log(values), 4 * roundoff):
        return "geometric", num_distinct
    return "", num_distinct


def _is_line(values: np.ndarray, tolerance: float) -> bool:
    ideal = np.linspace(values[0], values[-1], values.size)
    return bool((np.abs(values - ideal) <= tolerance).all())


def _is_short(buffer: torch.Tensor) -> bool:
    """Whether the values of a wide dtype fit bfloat16."""
    return bool((buffer.detach().to(torch.bfloat16).to(buffer.dtype) == buffer).all())
