"""What is read of a tensor: its own elements in logical order, at which place of the whole.

An ordinary tensor is one run of elements at offset 0. A DTensor is read where it lies: its local part, as runs of the global tensor. A
shard along the first dimension is one run; along a later one, one run a row:

    global 3 x 4, this rank holds columns 2 and 3     runs (start in the local part, elements, offset in the whole)
        . . a b                                        (0, 2, 2)
        . . c d                                        (2, 2, 6)
        . . e f                                        (4, 2, 10)

so that the fingerprints of all shards add up to that of the whole.
"""

from collections.abc import Sequence

import numpy as np
import torch

from holter_kernels.layout import FORMATS

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}

Run = tuple[int, int, int]
"""Start in the local part, number of elements, offset in the whole; all in elements."""


def check(position: int, tensor: torch.Tensor) -> None:
    """Raise ValueError with one clear sentence for what has no elements to read."""
    if (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype in FORMATS
        and tensor.layout is torch.strided
        and not tensor.is_meta
    ):
        return
    what = f"tensor {position} (shape {tuple(tensor.shape)}, {tensor.dtype})"
    if tensor.is_meta:
        raise ValueError(f"{what} is on the meta device: it has a shape but no values to summarize")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what} has layout {tensor.layout}: pass its values, for example tensor.coalesce().values()")
    if tensor.dtype not in FORMATS and tensor.dtype not in (torch.complex64, torch.complex128):
        raise ValueError(f"{what} has a dtype holter_kernels cannot read; view it as uint8, int16, int32 or int64")
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_wrapper and not is_sharded(tensor) and tensor.numel() and not tensor.data_ptr():
        raise ValueError(f"{what} is a {type(tensor).__name__} without memory of its own: pass the tensors inside it")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor, asked without importing torch.distributed."""
    return type(tensor) not in _PLAIN_TYPES and hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def holds_its_elements(tensor: torch.Tensor) -> bool:
    """False for a tensor whose storage was freed or shrunk behind it, as FSDP does to unsharded parameters."""
    if is_sharded(tensor):
        tensor = tensor.to_local()
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() >= (last + 1) * tensor.element_size()


def places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """What must stay the same for a pointer table to stay right: all addresses, then all sizes, then whether contiguous.

    One flat list of integers: a tuple for each of thousands of tensors would set off the garbage collector.
    """
    if not _PLAIN_TYPES.issuperset(map(type, tensors)):
        tensors = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]
    base = torch.Tensor
    return [*map(base.data_ptr, tensors), *map(base.numel, tensors), *map(base.is_contiguous, tensors)]


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every tensor's own memory, read from front to back, is its elements in logical order."""
    return (
        _PLAIN_TYPES.issuperset(map(type, tensors))
        and FORMATS.keys() >= {tensor.dtype for tensor in tensors}
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
    )


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements, detached, contiguous, as a dtype of `FORMATS`; the tensor's own memory where that is already so."""
    tensor = tensor.detach()
    if is_sharded(tensor):
        tensor = tensor.to_local()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().contiguous()


def runs(tensor: torch.Tensor) -> list[Run]:
    """Where the elements of `readable(tensor)` lie in the whole tensor."""
    if not is_sharded(tensor):
        numel = tensor.numel() * (2 if tensor.is_complex() else 1)
        return [(0, numel, 0)]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    parts = 2 if tensor.is_complex() else 1
    return [(s * parts, n * parts, o * parts) for s, n, o in box_runs(tuple(tensor.shape), tuple(shape), tuple(offset))]


def box_runs(whole: Sequence[int], box: Sequence[int], corner: Sequence[int]) -> list[Run]:
    """The runs of a contiguous box of shape `box` whose first element is at `corner` of a tensor of shape `whole`."""
    numel = int(np.prod(box, dtype=np.int64))
    if numel == 0:
        return []
    strides = [int(np.prod(whole[dim + 1 :], dtype=np.int64)) for dim in range(len(whole))]
    first = sum(c * s for c, s in zip(corner, strides, strict=True))
    cut = [dim for dim in range(len(whole)) if box[dim] != whole[dim]]
    if not cut:
        return [(0, numel, first)]
    length = int(np.prod(box[cut[-1] :], dtype=np.int64))
    places = np.zeros(1, np.int64)
    for dim in range(cut[-1]):
        places = (places[:, None] + np.arange(box[dim]) * strides[dim]).reshape(-1)
    return [(k * length, length, first + int(place)) for k, place in enumerate(places)]
