"""Which elements of a tensor are read, and where they lie in the whole tensor.

An ordinary tensor is one run of elements at offset 0. A DTensor is read where it lies: its local part, as runs of the global tensor. A
shard along the first dimension is one run; along a later one, one run a row:

    global 3 x 4, this rank holds columns 2 and 3     runs (start in the local part, elements, offset in the whole)
        . . a b                                        (0, 2, 2)
        . . c d                                        (2, 2, 6)
        . . e f                                        (4, 2, 10)

so that the fingerprints of all shards add up to that of the whole.

Runs say where elements lie from the tensor's own first byte on; where that byte is, `bases` says. Gradients that are made anew at every step have other
bases and the same runs, so that whatever was derived from the runs stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from holter_kernels.layout import BITS_DTYPE, FORMATS

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_PLAIN_TYPES = frozenset(PLAIN_TYPES)
_CODES = {dtype: fmt.code for dtype, fmt in FORMATS.items()}
WIDTHS = np.array([fmt.bits // 8 for fmt in sorted(FORMATS.values(), key=lambda fmt: fmt.code)], np.int64)
"""Bytes of an element, by the dtype's code."""
_COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

Run = tuple[int, int, int]
"""Start in the local part, number of elements, and offset in the whole tensor, all counted in elements."""

RUN = np.dtype([("row", np.int64), ("start", np.int64), ("count", np.int64), ("offset", np.int64), ("code", np.int64)])
"""A run of elements of one row of the result; `start` is in bytes from the row's base."""


@dataclass(slots=True)
class Sources:
    """Where the elements of a list of tensors lie."""

    signature: list[object] = field(default_factory=list)
    """For each tensor, a value that is equal only if the runs are equal."""
    bases: list[int] = field(default_factory=list)
    """Address of each tensor's first element; 0 for a tensor that has none."""
    runs: list[tuple[Run, ...]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    """Copies of what could not be read in place, to be dropped once the reading of them is queued."""
    left_out: list[int] = field(default_factory=list)
    """Positions of tensors that cannot be read at all."""
    bits_only: list[int] = field(default_factory=list)
    """Positions of tensors read as integers of their width, because their dtype is unknown here."""

    def table(self) -> np.ndarray:
        """Return the runs as an array of `RUN`; a tensor without memory has none."""
        flat = [
            (row, start, count, offset, code)
            for row, (runs, code, base) in enumerate(zip(self.runs, self.codes, self.bases, strict=True))
            if base
            for start, count, offset in runs
            if count
        ]
        table = np.array(flat, RUN)
        table["start"] *= WIDTHS[table["code"]]
        return table


def look(tensors: Sequence[torch.Tensor]) -> Sources:
    """Find the elements of each tensor; tensors that cannot be read are listed in `left_out`."""
    found = Sources()
    for position, tensor in enumerate(tensors):
        try:
            _look_at(found, tensor, position)
        except Exception:  # noqa: BLE001 - a tensor of a library that nobody here has heard of
            del found.signature[position:], found.bases[position:], found.runs[position:], found.codes[position:]
            _add(found, ("left out",), 0, (), 0)
            found.left_out.append(position)
    return found


def _add(found: Sources, signature: object, base: int, runs: tuple[Run, ...], code: int) -> None:
    found.signature.append(signature)
    found.bases.append(base)
    found.runs.append(runs)
    found.codes.append(code)


def _look_at(found: Sources, tensor: torch.Tensor, position: int) -> None:
    code = _CODES.get(tensor.dtype)
    if code is not None and type(tensor) in _PLAIN_TYPES and tensor.is_contiguous() and not tensor.is_neg():
        numel = tensor.numel()
        has = tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + numel) * tensor.element_size()
        base = tensor.data_ptr() if numel and has and not tensor.is_meta else 0
        if tensor.is_meta and numel:
            found.left_out.append(position)
        _add(found, (code, numel, base != 0), base, ((0, numel, 0),), code)
        return
    check(position, tensor)
    spec = tensor._spec if is_sharded(tensor) and hasattr(tensor, "_spec") else None  # noqa: SLF001 - its placements and mesh in one
    if not holds_its_elements(tensor):
        _add(found, ("lost", spec), 0, (), 0)
        return
    part = readable(tensor)
    if part.dtype not in FORMATS:
        part = part.view(BITS_DTYPE[part.element_size() * 8])
        found.bits_only.append(position)
    lies_elsewhere = part.data_ptr() != _local(tensor).data_ptr()
    if lies_elsewhere:
        found.kept.append(part)
    code, numel, base = _CODES[part.dtype], part.numel(), part.data_ptr()
    signature = (code, numel, base != 0, spec, tensor.is_complex())
    _add(found, signature, base, ((0, numel, 0),) if spec is None else tuple(runs(tensor)), code)


def check(position: int, tensor: torch.Tensor) -> None:
    """Raise ValueError with one clear sentence if a tensor has no elements to read."""
    what = f"tensor {position} (shape {tuple(tensor.shape)}, {tensor.dtype})"
    if tensor.is_meta:
        raise ValueError(f"{what} is on the meta device: it has a shape but no values to summarize")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what} has layout {tensor.layout}: pass its values, for example tensor.coalesce().values()")
    if tensor.is_quantized:
        raise ValueError(f"{what} is quantized: pass its int_repr()")
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_wrapper and not is_sharded(tensor) and tensor.numel() and not tensor.data_ptr():
        raise ValueError(f"{what} is a {type(tensor).__name__} without memory of its own: pass the tensors inside it")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor, determined without importing torch.distributed."""
    return type(tensor) not in _PLAIN_TYPES and hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, without the autograd of `to_local`; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    local = getattr(tensor, "_local_tensor", None)
    return local if type(local) in _PLAIN_TYPES else tensor.to_local()


def holds_its_elements(tensor: torch.Tensor) -> bool:
    """Whether the storage still holds the elements; FSDP frees or shrinks that of unsharded parameters."""
    tensor = _local(tensor)
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() >= (last + 1) * tensor.element_size()


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local elements, detached, contiguous and real, in the tensor's own memory if it is already so."""
    tensor = _local(tensor).detach()
    if tensor.is_complex():
        tensor = tensor.resolve_conj().contiguous().view(_COMPLEX[tensor.dtype])
    return tensor.resolve_neg().contiguous()


def runs(tensor: torch.Tensor) -> list[Run]:
    """Return where the elements of `readable(tensor)` lie in the whole tensor."""
    parts = 2 if tensor.is_complex() else 1
    if not is_sharded(tensor):
        return [(0, tensor.numel() * parts, 0)]
    mesh = tensor.device_mesh
    here = tuple(mesh.get_coordinate() or ())
    return list(_shard_runs(tuple(tensor.shape), mesh, tuple(tensor.placements), parts, here))


@lru_cache(maxsize=4096)
def _shard_runs(
    shape: tuple[int, ...],
    mesh: object,
    placements: tuple[object, ...],
    parts: int,
    here: tuple[int, ...],  # noqa: ARG001 - meshes that are equal may be seen from different places
) -> tuple[Run, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    box, corner = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple((s * parts, n * parts, o * parts) for s, n, o in box_runs(shape, tuple(box), tuple(corner)))


def box_runs(whole: Sequence[int], box: Sequence[int], corner: Sequence[int]) -> list[Run]:
    """Return the runs of a contiguous box of shape `box` whose first element is at `corner` of a tensor of shape `whole`."""
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
