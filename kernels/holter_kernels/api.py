"""Calls for a single use: they keep no tables between calls and wait for the result."""

import time
from collections.abc import Iterable, Sequence

import torch

from holter_kernels import cpu, devices
from holter_kernels.keys import MASK64
from holter_kernels.layout import BITS_DTYPE, FORMATS
from holter_kernels.passes import Pass
from holter_kernels.sources import check, holds_its_elements, readable, runs
from holter_kernels.table import Table

_POLL_S = 0.0002


def summarize(tensors: Sequence[torch.Tensor], histogram: str = "sampled") -> Table:
    """Return the statistics and fingerprint of each tensor; `histogram` is "off", "sampled" or "exact"."""
    while (reading := Pass(tensors, histogram).start(tensors)) is None:
        time.sleep(_POLL_S)
    while (table := reading.poll()) is None:
        time.sleep(_POLL_S)
    return table


def fingerprint(tensor: torch.Tensor, offset: int = 0) -> int:
    """Return 64 bits that depend on every element, its position, the dtype and the number of elements.

    `offset` is the index of the first element in the whole tensor if this is a shard; a DTensor knows its own. A tensor
    whose storage was taken away has fingerprint 0, like an empty one.
    """
    if offset < 0:
        raise ValueError(f"offset must not be negative, got {offset}")
    check(0, tensor)
    if not holds_its_elements(tensor):
        return 0
    part = readable(tensor)
    if part.dtype not in FORMATS:
        part = part.view(BITS_DTYPE[part.element_size() * 8])
    fmt = FORMATS[part.dtype]
    host = part if part.device.type == "cpu" else part.cpu()
    places = [(s, n, o + offset) for s, n, o in runs(tensor)]
    return sum(cpu.fingerprint_memory(fmt, host.data_ptr() + s * fmt.bits // 8, n, o) for s, n, o in places) & MASK64


def merge(fingerprints: Iterable[int]) -> int:
    """Return the fingerprint of a tensor from those of its shards, in any order, if each was taken at its offset."""
    return sum(int(part) for part in fingerprints) & MASK64


def backend(device_type: str = "cpu") -> str:
    """Return what reads this kind of device: an instruction set, "reference", "triton", "torch" (its operations), or "none"."""
    return cpu.backend() if device_type == "cpu" else devices.implementation(torch.device(device_type))
