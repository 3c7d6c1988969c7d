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
from holter_kernels.sources import WIDTHS, Sources, look

CHUNK = np.dtype(
    [("address", np.uint64), ("count", np.uint64), ("offset", np.uint64), ("row", np.uint32), ("code", np.uint32)]
)
GROUP = 1 << GROUP_SHIFT
JOB_BYTES = np.uint64(1 << 18)
# Fixed cost of a chunk, in bytes that could be read in the same time.
CHUNK_COST = np.uint64(512)


class Plan:
    """Chunks and jobs of a list of tensors. A row whose tensor has no memory has no chunks."""

    def __init__(self, tensors: Sequence[torch.Tensor] = (), sources: Sources | None = None) -> None:
        sources = look(tensors) if sources is None else sources
        self.chunks = cut(sources.table())
        """The chunks; their addresses are relative to the base of their row."""
        self.bases = np.array(sources.bases, np.uint64)
        """Current address of the first element of each row. Tensors that are made anew have other bases; the rest
        stays."""
        self.first_chunk = np.searchsorted(self.chunks["row"], np.arange(len(sources.bases) + 1)).astype(np.uint64)
        cost = np.cumsum(self.chunks["count"] * WIDTHS.astype(np.uint64)[self.chunks["code"]] + CHUNK_COST) // JOB_BYTES
        starts = np.flatnonzero(np.diff(cost, prepend=np.uint64(2**63)))
        self.jobs = np.append(starts, len(self.chunks)).astype(np.uint64)


def cut(runs: np.ndarray) -> np.ndarray:
    """Cut runs into chunks; their addresses are relative to the base of their row."""
    row, start, count, offset, code = (runs[name] for name in ("row", "start", "count", "offset", "code"))
    first_group = offset // GROUP
    pieces = (offset + count - 1) // GROUP - first_group + 1
    of = np.repeat(np.arange(len(runs)), pieces)
    group = first_group[of] + np.arange(of.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(offset[of], group * GROUP)
    end = np.minimum(offset[of] + count[of], (group + 1) * GROUP)
    chunks = np.empty(of.size, CHUNK)
    chunks["address"] = start[of] + (begin - offset[of]) * WIDTHS[code[of]]
    chunks["count"] = end - begin
    chunks["offset"] = begin
    chunks["row"] = row[of]
    chunks["code"] = code[of]
    return chunks
