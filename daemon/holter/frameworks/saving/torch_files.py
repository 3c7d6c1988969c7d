"""What torch.save wrote, read without running anything that it names.

    model.pt = zip, nothing compressed      <name>/data.pkl     the objects; tensors are (storage, offset, size, stride)
                                            <name>/data/0 …     the storages, as they lay in memory

torch.load(weights_only=True) refuses a file that names any class which it does not know; here each becomes a stand-in, and the tensors in it are
seen all the same. A stand-in imports nothing: it keeps the arguments and the state that the file gives an object, which is all that a reader of
tensors needs. Storages are mapped, not read: a tensor costs memory only while it is looked at.
"""

import codecs
import collections
import io
import mmap
import pickle
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any, Self

import torch

from holter.errors import VaultError

_PLAIN = {
    # As it is: a state_dict carries its versions as an attribute.
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("torch", "Size"): tuple,
    ("collections", "defaultdict"): lambda *_: {},
    ("_codecs", "encode"): codecs.encode,
}


class Inert:
    """Stands for an object of a class that is not to be run."""

    def __new__(cls, *arguments: Any, **_: Any) -> Self:
        """Any arguments will do."""
        made = super().__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **_: Any) -> "Inert":
        """What it would make is as inert as itself."""
        return Inert(self, *arguments)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["state"] = state

    def append(self, item: Any) -> None:
        """Of a list's subclass."""
        self.__dict__.setdefault("items", []).append(item)

    def extend(self, items: Any) -> None:
        """Of a list's subclass."""
        self.__dict__.setdefault("items", []).extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("entries", {})[key] = value


def stand_in(name: str) -> type[Inert]:
    """A class for each name, so that a debugger tells them apart."""
    return type(name.rpartition(".")[2] or "Inert", (Inert,), {})


class Unpickler:
    """Reads pickles; a format that stores some things beside the pickle tells where."""

    def plain(self, module: str, name: str) -> Any:
        """What a name means, if it is harmless; None: a stand-in."""
        return _PLAIN.get((module, name))

    def persistent(self, key: Any) -> Any:
        """What lies beside the pickle."""
        raise VaultError(f"it refers to {key!r}, which is not in it")

    def loads(self, content: bytes) -> Any:
        """What a pickle says, with stand-ins. Raises VaultError, or whatever a damaged one makes the reader stumble over."""
        reader = _Restricted(io.BytesIO(content))
        reader.rules = self
        return reader.load()


class _Restricted(pickle.Unpickler):
    rules: Unpickler

    def find_class(self, module: str, name: str) -> Any:
        found = self.rules.plain(module, name)
        return stand_in(name) if found is None else found

    def persistent_load(self, key: Any) -> Any:
        return self.rules.persistent(key)


_DTYPES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Lengths of name and extra field, before the content."""

Storage = tuple[torch.Tensor, torch.dtype]
"""Raw bytes, and what they are if nobody says otherwise."""


def load(source: Path | bytes) -> Any:
    """The objects of a file, or of a piece of one. Raises VaultError, or whatever a damaged one makes its reader stumble over."""
    if isinstance(source, Path):
        with source.open("rb") as file, zipfile.ZipFile(file) as archive:
            # A private copy of each page that is touched: torch wants memory that could be written.
            return _loaded(archive, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    with zipfile.ZipFile(io.BytesIO(source)) as archive:
        return _loaded(archive, bytearray(source))


def _loaded(archive: zipfile.ZipFile, buffer: mmap.mmap | bytearray) -> Any:
    objects = next((name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"), None)
    if objects is None:
        raise VaultError("it is a zip file, but not one of torch.save's")
    folder = objects.removesuffix("data.pkl")
    order = f"{folder}byteorder"
    if order in archive.namelist() and archive.read(order).decode() != sys.byteorder:
        raise VaultError("it was written on a machine with another byte order")
    return _Reader(archive, buffer, folder).loads(archive.read(objects))


class _Reader(Unpickler):
    def __init__(self, archive: zipfile.ZipFile, buffer: mmap.mmap | bytearray, folder: str) -> None:
        super().__init__()
        self._archive, self._buffer, self._folder = archive, buffer, folder

    def plain(self, module: str, name: str) -> Any:
        """Tensors are made as torch makes them; the rest is as in every pickle."""
        if module == "torch._utils" and name in _REBUILD:
            return _REBUILD[name]
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return lambda make, _type, arguments, _state: make(*arguments)
        if module in {"torch", "torch.storage"} and name.endswith("Storage"):
            return _DTYPES.get(name.removesuffix("Storage"), torch.uint8)
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else super().plain(module, name)

    def persistent(self, key: Any) -> Storage:
        """A storage: ('storage', type, name, device, elements)."""
        _, dtype, name, *_ = key
        entry = self._archive.getinfo(f"{self._folder}data/{name}")
        names, extra = _LOCAL_HEADER.unpack_from(self._buffer, entry.header_offset)
        start = entry.header_offset + _LOCAL_HEADER.size + names + extra
        if entry.compress_type != zipfile.ZIP_STORED or start + entry.file_size > len(self._buffer):
            raise VaultError(f"storage {name} does not lie in the file as it should")
        if not entry.file_size:
            return torch.empty(0, dtype=torch.uint8), dtype
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=entry.file_size, offset=start), dtype


def _tensor(storage: Storage, offset: int, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    content, dtype = storage
    return torch.as_strided(content.view(dtype), tuple(size), tuple(stride), offset)


def _tensor_of_dtype(storage: Storage, offset: int, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    """Of a dtype that came after typed storages: (…, requires_grad, hooks, dtype)."""
    return _tensor((storage[0], rest[2]), offset, size, stride)


_REBUILD = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_tensor_v3": _tensor_of_dtype,
    "_rebuild_parameter": lambda data, *_: data,
    "_rebuild_parameter_with_state": lambda data, *_: data,
}
