"""Statistics of a batch's tensors at a step of comparison: range, mean, whether constant, whether finite.

Small tensors are asked by torch, which takes microseconds; large ones by the fused pass, which reads memory once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from holter.rank.readings.batches import Leaf
from holter_kernels import summarize

MAX_LEAVES = 8
"""Tensors of a batch whose statistics travel."""
SMALL = 1 << 16
SAMPLED_INTEGERS = 1 << 20
"""Of a larger tensor of integers every n-th is asked."""
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


@dataclass(frozen=True)
class Survey:
    """One tensor of a batch; range and mean are over what is finite."""

    path: str
    numel: int
    low: float
    high: float
    mean: float
    nans: int = 0
    infs: int = 0

    def numbers(self) -> Iterator[tuple[str, float]]:
        """By the names of `records.NUMBERS`."""
        if math.isfinite(self.low):
            yield f"batch.{self.path}.min", self.low
            yield f"batch.{self.path}.max", self.high
            yield f"batch.{self.path}.mean", self.mean
            yield f"batch.{self.path}.absmax", max(abs(self.low), abs(self.high))
            is_constant = self.numel > 1 and self.low == self.high and not self.nans and not self.infs
            yield f"batch.{self.path}.is_constant", float(is_constant)


def survey(leaves: list[Leaf]) -> list[Survey]:
    """Look at these tensors; what lies on a device, or is neither float nor integer, is left out."""
    found, large = [], []
    for path, tensor in leaves:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            continue
        if tensor.dtype in _INTEGERS:
            found.append(_integers(path, tensor))
        elif tensor.is_floating_point():
            quick = _floats(path, tensor) if tensor.numel() <= SMALL else None
            if quick is not None:
                found.append(quick)
            else:
                large.append((path, tensor))
    return found + (_fused(large) if large else [])


def _integers(path: str, tensor: torch.Tensor) -> Survey:
    if tensor.numel() > SAMPLED_INTEGERS and tensor.is_contiguous():
        tensor = tensor.view(-1)[:: -(-tensor.numel() // SAMPLED_INTEGERS) | 1]
    low, high = tensor.aminmax()
    return Survey(path, tensor.numel(), float(low), float(high), float(tensor.sum()) / tensor.numel())


def _floats(path: str, tensor: torch.Tensor) -> Survey | None:
    """None: something is not finite, and is to be counted."""
    low, high = map(float, tensor.float().aminmax())
    if not math.isfinite(low) or not math.isfinite(high):
        return None
    return Survey(path, tensor.numel(), low, high, float(tensor.mean(dtype=torch.float64)))


def _fused(leaves: list[Leaf]) -> list[Survey]:
    table = summarize([tensor for _, tensor in leaves], histogram="off")
    found = []
    for row, (path, tensor) in enumerate(leaves):
        nans, infs = int(table.nans[row]), int(table.pos_infs[row] + table.neg_infs[row])
        num_finite = tensor.numel() - nans - infs
        low, high = (float(table.min[row]), float(table.max[row])) if num_finite else (math.nan, math.nan)
        found.append(Survey(path, tensor.numel(), low, high, float(table.sum[row]) / max(num_finite, 1), nans, infs))
    return found
