"""Look at many dense CPU tensors, or parameters' gradients, in one native call: addresses, layouts and version counters.

    see(parameters, gradients=True)   148 gradients: 10 us; asking torch in Python for .grad, type, layout, data_ptr, _version of each: 100 us

torch's own functions are called: some from its list of stable ones, four by the names that a C++ compiler gives them. They are tried when they are first
asked for, on tensors of every kind that can come; where one is missing or an answer is not Python's, nobody uses them, and each tensor is asked in Python. A list
with anything else in it (None, a DTensor, a sparse gradient, a device's, another dtype, a view that is not contiguous) is not seen, and asked in Python too.
"""

import ctypes
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from holter_kernels.sources import PLAIN_TYPES

try:
    from holter_kernels import _native
except ImportError:
    _native = None  # type: ignore[assignment]

SYMBOLS = (
    ("libc10.so", "_ZNK3c1010TensorImpl4gradEv"),
    ("libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv"),
    ("libtorch_cpu.so", "_ZNK2at10TensorBase8_versionEv"),
    ("libtorch_cpu.so", "_ZN2at6native12is_inferenceERKNS_6TensorE"),
    ("libtorch_cpu.so", "_ZN2at6native6is_negERKNS_6TensorE"),
    *(
        ("libtorch_cpu.so", f"aoti_torch_{name}")
        for name in (
            "get_layout",
            "get_dtype",
            "get_device_type",
            "get_numel",
            "get_storage_offset",
            "get_storage_size",
            "is_contiguous",
            "get_data_ptr",
        )
    ),
)
"""Torch's functions, in the order in which `csrc/seen.c` has them."""
_HOST_KINDS = {torch.float32: 0x0101_2002, torch.float64: 0x0101_4002, torch.float16: 0x0101_1002, torch.bfloat16: 0x0101_1004}  # fmt: skip
_gradient = operator.attrgetter("grad")


class SeenTensors(Sequence[torch.Tensor]):
    """A list of tensors with what was seen of them. Python objects of gradients are made only if somebody asks for one."""

    __slots__ = ("_make", "_tensors", "addresses", "layouts", "versions")

    def __init__(self, found: tuple[bytes, bytes, bytes], make: Callable[[], list[Any]]) -> None:
        self.addresses, self.versions, self.layouts = found
        """One 8-byte word for each tensor: these bytes are equal if and only if nothing has changed."""
        self._make = make
        self._tensors: list[Any] | None = None

    @property
    def tensors(self) -> list[Any]:
        """The tensors as a list."""
        if self._tensors is None:
            self._tensors = self._make()
        return self._tensors

    def __len__(self) -> int:
        return len(self.addresses) // 8

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors)

    @overload
    def __getitem__(self, place: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, place: int | slice) -> Any:
        return self.tensors[place]


def see(tensors: list[Any], *, gradients: bool = False) -> SeenTensors | None:
    """Look at these tensors, or at their gradients; None if not all are of the kind that native code can look at."""
    if not is_sound() or not tensors:
        return None
    found = _native.see(tensors, PLAIN_TYPES, gradients)
    if found is None:
        return None
    return SeenTensors(found, lambda: list(map(_gradient, tensors)) if gradients else tensors)


def kinds(tensors: list[Any]) -> Any:
    """What is equal as long as every one of these keeps its dtype, and requires a gradient or does not."""
    found = _native.kinds(tensors, PLAIN_TYPES) if is_sound() else None
    return [(tensor.requires_grad, tensor.dtype) for tensor in tensors] if found is None else found


@lru_cache(maxsize=1)
def is_sound(symbols: tuple[tuple[str, str], ...] = SYMBOLS) -> bool:
    """Whether torch's functions exist and agree with Python on tensors of every kind."""
    if _native is None:
        return False
    try:
        with torch.inference_mode(mode=False), torch.device("cpu"):
            is_bound = _bind(symbols) and _is_right()
    except Exception:  # noqa: BLE001 - another torch: each tensor is asked in Python, as it always can be
        is_bound = False
    if not is_bound:
        _native.bind((), None, 0, 0)
    return is_bound


def _bind(symbols: tuple[tuple[str, str], ...]) -> bool:
    folder = Path(torch.__file__).parent / "lib"
    addresses = tuple(
        ctypes.cast(getattr(ctypes.CDLL(str(folder / library)), name), ctypes.c_void_p).value
        for library, name in symbols
    )
    sample = torch.empty(1)
    return bool(_native.bind(addresses, sample, sample._cdata, torch.Tensor.__basicsize__))  # noqa: SLF001 - where it is implemented


def _is_right() -> bool:
    seen = [*_dense(), *(_parameter(each) for each in _dense())]
    seen[1].add_(1).add_(1)
    owners = [_parameter(each) for each in _dense()]
    for owner, gradient in zip(owners, _dense(), strict=True):
        owner.grad = gradient
    owners[0].grad.add_(1)
    found, of_gradients = see_unchecked(seen), see_unchecked(owners, gradients=True)
    is_seen = _says(found, seen) and _says(of_gradients, [owner.grad for owner in owners]) and _knows_kinds(owners)
    return is_seen and all(see_unchecked([each]) is None for each in _other()) and not _has_seen_other_gradients()


def _knows_kinds(trained: list[torch.nn.Parameter]) -> bool:
    told = [_native.kinds([p], PLAIN_TYPES) for p in trained]
    frozen = [_native.kinds([p.detach()], PLAIN_TYPES) for p in trained]
    is_each_its_own = len(set(told + frozen)) == 2 * len({p.dtype for p in trained})
    return is_each_its_own and _native.kinds(trained, PLAIN_TYPES) == b"".join(told)


def see_unchecked(tensors: list[Any], *, gradients: bool = False) -> Any:
    """Return the native code's answer without checking that it is sound."""
    return _native.see(tensors, PLAIN_TYPES, gradients)


def _says(found: Any, tensors: Sequence[torch.Tensor]) -> bool:
    if found is None:
        return False
    addresses, versions, layouts = (np.frombuffer(part, np.uint64).tolist() for part in found)
    told = [word for t in tensors for word in (t.numel(), _HOST_KINDS[t.dtype])]
    return (
        addresses == [t.data_ptr() for t in tensors]
        and versions == [t._version for t in tensors]  # noqa: SLF001 - the very number
        and layouts == told
    )


def _dense() -> list[torch.Tensor]:
    whole = torch.arange(24.0).reshape(4, 6)
    return [whole, whole[2:], torch.ones(3, dtype=torch.float64), torch.ones(5, 1, 2, 1, 2, 3, dtype=torch.bfloat16), torch.ones((), dtype=torch.float16)]  # fmt: skip


def _other() -> list[Any]:
    whole = torch.arange(24.0).reshape(4, 6)
    shrunk = torch.ones(8)
    shrunk.untyped_storage().resize_(0)
    with torch.inference_mode():
        untracked = torch.ones(3)
    return [
        None,
        whole.t(),
        whole[:, :2],
        whole[:0],
        whole.to_sparse(),
        whole.long(),
        whole.to("meta"),
        torch._neg_view(whole),  # noqa: SLF001 - nothing public makes one of real numbers
        torch.complex(whole, whole),
        shrunk,
        untracked,
    ]


def _has_seen_other_gradients() -> bool:
    without, sparse = _parameter(torch.ones(2)), _parameter(torch.ones(2))
    sparse.grad = torch.ones(2).to_sparse()
    return any(see_unchecked([each], gradients=True) is not None for each in (without, sparse, torch.ones(2)))


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().clone())
