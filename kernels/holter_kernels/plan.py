"""The pointer table: which memory belongs to which row, cut into chunks that one thread reads at a time.

A chunk never crosses a multiple of 65,536 elements of the whole tensor, so it has one group key (see `keys.py`) and float sums are
added in the same order whatever the number of threads. Consecutive chunks form a job of about 256 KiB, the unit that threads take.

    tensors     a (100,000 float32)      b (10 float32)   c (5 float32)
    chunks      a[0:65536]  a[65536:]    b                c
    jobs        |- 0 -----| |- 1 ------------------------------------|
"""

from collections.abc import Sequence

import numpy as np
import torch

from holter_kernels.keys import GROUP_SHIFT
from holter_kernels.layout import FORMATS
from holter_kernels.sources import are_plain, holds_its_elements, readable, runs

CHUNK = np.dtype(
    [("address", np.uint64), ("count", np.uint64), ("offset", np.uint64), ("row", np.uint32), ("code", np.uint32)]
)
JOB_BYTES = np.uint64(1 << 18)
# A chunk costs some hundred bytes' worth of time however small it is.
CHUNK_COST = np.uint64(512)

CODES = {dtype: fmt.code for dtype, fmt in FORMATS.items()}
GROUPS = np.full(len(FORMATS), 1 << GROUP_SHIFT, np.uint64)
"""By code of the dtype, the multiples of which a chunk does not cross."""
WIDTHS = np.array([fmt.bits // 8 for fmt in sorted(FORMATS.values(), key=lambda fmt: fmt.code)], np.uint64)


class Plan:
    """Chunks and jobs of a list of tensors; a row whose tensor has no memory has no chunks."""

    def __init__(self, tensors: Sequence[torch.Tensor], grains: np.ndarray = GROUPS) -> None:
        self.kept: list[torch.Tensor] = []
        """Copies of what could not be read in place; they live as long as the plan."""
        is_plain = are_plain(tensors)
        self.chunks = cut(describe(tensors) if is_plain else self._describe_any(tensors), grains)
        self._rows = self.chunks["row"].astype(np.int64)
        # Where a tensor had no memory there are no chunks to move.
        is_whole = is_plain and len(np.unique(self._rows)) == sum(tensor.numel() > 0 for tensor in tensors)
        self._within = self.chunks["address"] - _addresses(tensors)[self._rows] if is_whole else None
        self.first_chunk = np.searchsorted(self.chunks["row"], np.arange(len(tensors) + 1)).astype(np.uint64)
        cost = np.cumsum(self.chunks["count"] * WIDTHS[self.chunks["code"]] + CHUNK_COST) // JOB_BYTES
        starts = np.flatnonzero(np.diff(cost, prepend=np.uint64(2**63)))
        self.jobs = np.append(starts, len(self.chunks)).astype(np.uint64)

    def move(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> bool:
        """Read tensors of the same sizes and dtypes that lie elsewhere; False, and nothing changed, if a new plan is needed.

        Gradients that are made anew at every step: a tenth of the cost of cutting the same chunks again.
        """
        # A storage that was freed has no address; one that was cut short keeps its own, and is met where the plan is made.
        if self._within is None or 0 in addresses or any(map(torch.Tensor.is_neg, tensors)):
            return False
        self.chunks["address"] = np.array(addresses, np.uint64)[self._rows] + self._within
        return True

    def _describe_any(self, tensors: Sequence[torch.Tensor]) -> np.ndarray:
        found = []
        for row, tensor in enumerate(tensors):
            if are_plain([tensor]):
                table = describe([tensor])
            elif not holds_its_elements(tensor):
                continue
            else:
                part = readable(tensor)
                self.kept.append(part)
                table = np.array([(s, n, o, 0, CODES[part.dtype]) for s, n, o in runs(tensor) if n], np.uint64).reshape(
                    -1, 5
                )
                table[:, 0] = table[:, 0] * np.uint64(part.element_size()) + np.uint64(part.data_ptr())
            table[:, 3] = row
            found.append(table)
        return np.concatenate([np.empty((0, 5), np.uint64), *found])


def _addresses(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.array([tensor.data_ptr() for tensor in tensors], np.uint64)


def describe(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Five columns (address, count, offset, row, code) of plain tensors.

    Left out are empty ones, and those whose storage was freed or shrunk behind them, as FSDP does to unsharded parameters.
    """
    table = np.zeros((len(tensors), 5), np.uint64)
    table[:, 0] = [tensor.data_ptr() for tensor in tensors]
    table[:, 1] = [tensor.numel() for tensor in tensors]
    table[:, 3] = np.arange(len(tensors))
    table[:, 4] = [CODES[tensor.dtype] for tensor in tensors]
    start = np.array([tensor.storage_offset() for tensor in tensors], np.uint64)
    has = np.array([tensor.untyped_storage().nbytes() for tensor in tensors], np.uint64)
    needs = (start + table[:, 1]) * WIDTHS[table[:, 4]]
    return table[(table[:, 1] > 0) & (needs <= has)]


def cut(table: np.ndarray, grains: np.ndarray = GROUPS) -> np.ndarray:
    """Chunks of (address, count, offset, row, code) rows."""
    address, count, offset, row, code = table.T
    one, grain = np.uint64(1), grains[code]
    first_group = offset // grain
    pieces = ((offset + count - one) // grain - first_group + one).astype(np.int64)
    of = np.repeat(np.arange(len(table)), pieces)
    group = first_group[of] + (np.arange(of.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.uint64)
    begin = np.maximum(offset[of], group * grain[of])
    end = np.minimum(offset[of] + count[of], (group + one) * grain[of])
    chunks = np.empty(of.size, CHUNK)
    chunks["address"] = address[of] + (begin - offset[of]) * WIDTHS[code[of]]
    chunks["count"] = end - begin
    chunks["offset"] = begin
    chunks["row"] = row[of]
    chunks["code"] = code[of]
    return chunks
