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
from holter_kernels.sources import is_plain, readable, runs

CHUNK = np.dtype(
    [("address", np.uint64), ("count", np.uint64), ("offset", np.uint64), ("row", np.uint32), ("code", np.uint32)]
)
GROUP = np.uint64(1 << GROUP_SHIFT)
JOB_BYTES = np.uint64(1 << 18)
# A chunk costs some hundred bytes' worth of time however small it is.
CHUNK_COST = np.uint64(512)

WIDTHS = np.array([fmt.bits // 8 for fmt in sorted(FORMATS.values(), key=lambda fmt: fmt.code)], np.uint64)


def holds_its_elements(tensor: torch.Tensor) -> bool:
    """False for a tensor whose storage was freed or shrunk behind it, as FSDP does to unsharded parameters."""
    need = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= need


class Plan:
    """Chunks and jobs of a list of tensors; a row whose tensor is gone (None, or without memory) has no chunks."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.kept: list[torch.Tensor] = []
        """Copies of what could not be read in place; they live as long as the plan."""
        table: list[tuple[int, int, int, int, int]] = []
        for row, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if not is_plain(tensor):
                part = readable(tensor)
                self.kept.append(part)
                width = part.element_size()
                code = FORMATS[part.dtype].code
                table += [(part.data_ptr() + s * width, n, o, row, code) for s, n, o in runs(tensor) if n]
            elif tensor.numel() and holds_its_elements(tensor):
                table.append((tensor.data_ptr(), tensor.numel(), 0, row, FORMATS[tensor.dtype].code))
        self.chunks = cut(np.array(table, np.uint64).reshape(-1, 5))
        self.first_chunk = np.searchsorted(self.chunks["row"], np.arange(len(tensors) + 1)).astype(np.uint64)
        cost = np.cumsum(self.chunks["count"] * WIDTHS[self.chunks["code"]] + CHUNK_COST) // JOB_BYTES
        starts = np.flatnonzero(np.diff(cost, prepend=np.uint64(2**63)))
        self.jobs = np.append(starts, len(self.chunks)).astype(np.uint64)


def cut(table: np.ndarray) -> np.ndarray:
    """Chunks of (address, count, offset, row, code) rows."""
    address, count, offset, row, code = table.T
    one = np.uint64(1)
    first_group = offset // GROUP
    pieces = ((offset + count - one) // GROUP - first_group + one).astype(np.int64)
    of = np.repeat(np.arange(len(table)), pieces)
    group = first_group[of] + (np.arange(of.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.uint64)
    begin = np.maximum(offset[of], group * GROUP)
    end = np.minimum(offset[of] + count[of], (group + one) * GROUP)
    chunks = np.empty(of.size, CHUNK)
    chunks["address"] = address[of] + (begin - offset[of]) * WIDTHS[code[of]]
    chunks["count"] = end - begin
    chunks["offset"] = begin
    chunks["row"] = row[of]
    chunks["code"] = code[of]
    return chunks
