"""A few elements of many tensors, copied before a step and compared with their values after it.

    weight   [ x . . . . x . . . . x . . . . x ]      every stride-th element of its memory, at most 1024 of a tensor
    gradient [ g . . . . g . . . . g . . . . g ]      at the same places

All of it runs as operations on the tensors' own device, whose results are read by the fused pass: nothing is waited for.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from holter.rank.accelerator import is_capturing

MAX_TENSORS = 64
MAX_ELEMENTS = 1024
IMAGE_DIMS = 4
DTYPES = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}
)


def local(tensor: Any) -> torch.Tensor:
    """Return the elements that this rank holds of a tensor, detached from the graph."""
    # Not to_local(), which is an operation of its own for autograd and costs twenty times as much.
    part: torch.Tensor = tensor._local_tensor if hasattr(tensor, "placements") else tensor  # noqa: SLF001
    return part.detach()


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has floating-point elements that lie densely in memory."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.dtype in DTYPES
        and tensor.numel() > 0
        and (
            tensor.is_contiguous()
            or (tensor.dim() == IMAGE_DIMS and tensor.is_contiguous(memory_format=torch.channels_last))
        )
    )


def is_plain_moment() -> bool:
    """Whether our own operations run directly: no mode that records or batches operations is on, and no graph is being captured."""
    is_direct = torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None  # noqa: SLF001
    return is_direct and not is_capturing()


def strided(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a view of at most `most` elements, evenly spread over the tensor's memory."""
    step = -(-tensor.numel() // most)
    count = -(-tensor.numel() // step)
    return tensor.as_strided((count,), (step,), tensor.storage_offset())


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the indices 0 to count - 1, evenly spread."""
    if count <= most:
        return list(range(count))
    return [index * count // most for index in range(most)]


class Samples:
    """Samples weights and gradients of groups of parameters before a step, and finds what the step added."""

    def __init__(self, groups: Sequence[Sequence[Any]]) -> None:
        each = max(1, MAX_TENSORS // max(len(groups), 1))
        self._groups: list[tuple[list[Any], torch.Tensor, torch.Tensor] | None] = []
        for group in groups:
            given = [p for p in group if p.grad is not None and not p.grad.is_sparse]
            chosen = [p for index in spread(len(given), each) if _is_fit(p := given[index])]
            if not chosen:
                self._groups.append(None)
                continue
            gradients = torch.cat([strided(local(p.grad), MAX_ELEMENTS) for p in chosen])
            self._groups.append(([weakref.ref(p) for p in chosen], _weights(chosen), gradients != 0))

    def differences(self) -> list[torch.Tensor]:
        """Return three tensors per group: the weights before, what was added to them, and the same with NaN where the gradient was zero."""
        out: list[torch.Tensor] = []
        for entry in self._groups:
            parameters = [reference() for reference in entry[0]] if entry else []
            if entry is None or any(p is None or not is_readable(local(p)) for p in parameters):
                out += [torch.empty(0)] * 3
                continue
            _, before, has_gradient = entry
            after = _weights(parameters)
            if after.shape != before.shape:
                out += [torch.empty(0)] * 3
                continue
            added = after - before
            out += [before, added, torch.where(has_gradient, added, torch.nan)]
        return out


def _is_fit(parameter: Any) -> bool:
    weight, gradient = local(parameter), local(parameter.grad)
    return is_readable(weight) and is_readable(gradient) and weight.stride() == gradient.stride()


def _weights(parameters: Sequence[Any]) -> torch.Tensor:
    """Return sampled weights in a dtype in which no difference vanishes: float64 stays, all others become float32."""
    flat = torch.cat([strided(local(p), MAX_ELEMENTS) for p in parameters])
    return flat.float() if flat.dtype != torch.float64 else flat.clone()
