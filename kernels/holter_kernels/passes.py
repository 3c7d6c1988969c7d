"""One pass over a list of tensors, kept between steps.

p = Pass(tensors)                    # pointer table
…each step:
if not p.matches(tensors):           # the list changed, or memory moved
p = Pass(tensors)
p.launch()                           # CPU: computes now. GPU: starts on a side stream, waits for nothing
table = p.poll()                     # a Table, or None while the GPU still works
"""

import importlib.util
import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from holter_kernels.cpu import CpuPass
from holter_kernels.layout import NUM_BINS, ROW
from holter_kernels.sources import check, places
from holter_kernels.table import Table

if TYPE_CHECKING:
    from holter_kernels.gpu import GpuPass

_CPU = torch.device("cpu")
_GONE = torch.empty(0)
HISTOGRAMS = ("off", "sampled", "exact")


class Pass:
    """A cached pointer table over a list of tensors of any dtypes and devices.

    It holds the tensors weakly: a gradient that was dropped is not kept alive, and its row is that of an empty tensor. A tensor that
    moved or was resized is read where it lies now. Tensors that are not contiguous are copied at each launch.

    `statistics=False` computes fingerprints alone. ValueError at construction, never later: a tensor on the meta device, a
    sparse one, an unknown dtype, a device that no implementation reads.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], histogram: str = "sampled", *, statistics: bool = True) -> None:
        if histogram not in HISTOGRAMS:
            raise ValueError(f"histogram must be one of {', '.join(HISTOGRAMS)}, got {histogram!r}")
        tensors = list(tensors)
        for position, tensor in enumerate(tensors):
            check(position, tensor)
        self._refs = [weakref.ref(tensor) for tensor in tensors]
        self._kinds = _kinds(tensors)
        self._places = places(tensors)
        by_device: dict[torch.device, list[int]] = {}
        for position, tensor in enumerate(tensors):
            device = _CPU if tensor.is_cpu else tensor.device
            by_device.setdefault(device, []).append(position)
        self._parts = [
            (positions, _part(device, [tensors[k] for k in positions], histogram=histogram, statistics=statistics))
            for device, positions in by_device.items()
        ]
        self._wants_bins = statistics and histogram != "off"
        self._launched = False

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same tensor objects with the same memory and sizes."""
        return (
            len(tensors) == len(self._refs)
            and all(ref() is tensor for ref, tensor in zip(self._refs, tensors, strict=True))
            and places(list(tensors)) == self._places
        )

    def aim(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Read these tensors from the next launch on; False, and nothing changed, if their number, dtypes or devices are others.

        Gradients that are made anew at every step are other objects, most often in the same memory: the table need not be.
        """
        if len(tensors) != len(self._refs) or _kinds(tensors) != self._kinds:
            return False
        self._refs = [weakref.ref(tensor) for tensor in tensors]
        self._places = []
        return True

    def launch_on(self, tensors: Sequence[torch.Tensor]) -> bool:
        """`aim` and `launch` for one time: what `launch` reads stays what it was."""
        if len(tensors) != len(self._refs) or _kinds(tensors) != self._kinds:
            return False
        self._launch(tensors)
        return True

    def launch(self) -> None:
        """Start reading; on CPU this is the whole computation, on a GPU it returns at once."""
        alive = [ref() for ref in self._refs]
        where = self._launch([_GONE if tensor is None else tensor for tensor in alive])
        if len(self._parts) == 1:
            self._places = where

    def _launch(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        where: list[int] = []
        for positions, part in self._parts:
            mine = tensors if len(self._parts) == 1 else [tensors[k] for k in positions]
            where = places(mine)
            part.launch(mine, where)
        self._launched = True
        return where

    def poll(self) -> Table | None:
        """The result of the last launch, the caller's to keep; None while it is under way or nothing was launched."""
        if not self._launched:
            return None
        results = [(positions, part.result()) for positions, part in self._parts]
        if any(result is None for _, result in results):
            return None
        if len(results) == 1:
            rows, bins = results[0][1]
            return Table(rows, bins)
        rows = np.zeros(len(self._refs), ROW)
        bins = np.zeros((len(self._refs), NUM_BINS), np.uint64) if self._wants_bins else None
        for positions, (part_rows, part_bins) in results:
            rows[positions] = part_rows
            if bins is not None:
                bins[positions] = part_bins
        return Table(rows, bins)


_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")


def _kinds(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [*map(type, tensors), *map(_dtype, tensors), *map(_device, tensors)]


def _part(
    device: torch.device, tensors: list[torch.Tensor], *, histogram: str, statistics: bool
) -> "CpuPass | GpuPass":
    if device.type == "cpu":
        return CpuPass(tensors, histogram=histogram, statistics=statistics)
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        from holter_kernels.gpu import GpuPass  # noqa: PLC0415 - triton is needed for GPU tensors only

        return GpuPass(tensors, device, histogram=histogram, statistics=statistics)
    reason = "triton is not installed" if device.type == "cuda" else "only CPU, CUDA and ROCm are"
    raise ValueError(f"tensors on {device} cannot be read: {reason}")
