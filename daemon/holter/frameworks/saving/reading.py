"""A checkpoint read back: every tensor in its files, one at a time, whatever framework wrote them; nothing that a file names is run.

    *.safetensors                       by safetensors
    *.bin *.pt *.pth *.pkl *.ckpt       what torch.save wrote: a zip, nothing compressed
        <name>/data.pkl                 the objects; tensors are (storage, offset, size, stride)
        <name>/data/0 …                 the storages, as they lay in memory
    *.distcp                            pieces of torch.distributed.checkpoint, found by its .metadata: `name@offset,offset`

torch.load(weights_only=True) refuses a file that names any class which it does not know; here each becomes a stand-in (`inert_pickle.py`), and the
tensors in it are seen all the same. Storages are mapped, not read: a tensor costs memory only while it is looked at. torch.save compresses nothing: what
is compressed, or says that it is larger than its file, is refused.

A file of another kind holds no tensors as far as we know; its digest covers it. The tensors are compared with a manifest, or, where there is
none, looked at for values that are not finite.
"""

import contextlib
import functools
import io
import math
import mmap
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holter.errors import VaultError
from holter.frameworks.saving.inert_pickle import Inert, InertUnpickler
from holter.halting.vault.manifest import Manifest, StoredTensor
from holter.halting.vault.verification import Problem
from holter.rank.readings.fused_pass import count_nonfinite, fingerprint_of

TORCH_SAVED = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})
_PIECES = re.compile(r"__(\d+)_\d+\.distcp")
MAX_CONTAINERS = 10_000_000
MAX_REPEATS = 65_536
"""How often an expanded tensor may repeat its stored elements; masks and tables are stored so."""

Named = tuple[str, torch.Tensor]
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
"""Reads the lengths of name and extra field, which precede the content."""
_Storage = tuple[torch.Tensor, torch.dtype]
"""The raw bytes, and their dtype unless the tensor names another."""


def holds_tensors(name: str) -> bool:
    """Whether a file of this name may hold tensors."""
    return Path(name).suffix in TORCH_SAVED | {".safetensors", ".distcp"}


def tensors_in(path: Path) -> Iterator[Named]:
    """Yield the tensors of one file.

    Raises VaultError with the reason if it cannot be read safely, perhaps after some tensors.
    """
    read = {".safetensors": _of_safetensors, ".distcp": _of_pieces}.get(path.suffix, _of_torch_save)
    try:
        yield from read(path)
    except VaultError:
        raise
    except Exception as error:  # a damaged file makes its reader stumble over anything
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise VaultError(f"{path.name} cannot be read: {reason[:200]}") from error


def _of_safetensors(path: Path) -> Iterator[Named]:
    from safetensors import safe_open  # noqa: PLC0415 - comes with the frameworks that write it

    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            yield name, file.get_tensor(name)


def _of_torch_save(path: Path) -> Iterator[Named]:
    yield from _walk("", _load(path))


def _of_pieces(path: Path) -> Iterator[Named]:
    pieces = [piece for piece in _pieces(*_metadata(path)) if piece.file == path.name]
    if not pieces:
        raise VaultError(f"{path.name} is not in the checkpoint's .metadata")
    with path.open("rb") as file:
        for piece in pieces:
            file.seek(piece.offset)
            content = file.read(piece.length)
            with contextlib.suppress(Exception) if piece.is_bytes else contextlib.nullcontext():
                loaded = _load(content)
                name = piece.name + (f"@{','.join(map(str, piece.corner))}" if any(piece.corner) else "")
                yield from _walk(name, loaded)


class _Piece:
    """Where one item of a distributed checkpoint is stored."""

    def __init__(self, index: Any, info: Any) -> None:
        self.name = str(index.fqn)
        corner = getattr(index, "offset", None)
        self.is_bytes = corner is None
        """Whether the item is no tensor by itself; it may contain some."""
        self.corner = tuple(corner or ())
        self.file, self.offset, self.length = str(info.relative_path), int(info.offset), int(info.length)


def _metadata(path: Path) -> tuple[Path, int]:
    found = _PIECES.fullmatch(path.name)
    own = [path.with_name(f"__{found[1]}.metadata")] if found else []
    for candidate in (path.with_name(".metadata"), path.with_name(".metadata.incomplete"), *own):
        if candidate.is_file():
            return candidate, candidate.stat().st_mtime_ns
    raise VaultError(f"there is no .metadata beside {path.name}, which says where in it the tensors are")


@functools.lru_cache(maxsize=4)
def _pieces(path: Path, _written_ns: int) -> list[_Piece]:
    try:
        metadata = InertUnpickler(path.read_bytes()).load()
        return [_Piece(index, info) for index, info in metadata.storage_data.items()]
    except Exception as error:
        raise VaultError(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error


def _walk(name: str, thing: Any, seen: set[int] | None = None) -> Iterator[Named]:
    """Yield the tensors inside, by their path; an object that contains itself is entered once."""
    seen = set() if seen is None else seen
    if isinstance(thing, torch.Tensor):
        yield name, thing
    elif id(thing) not in seen and len(seen) < MAX_CONTAINERS:
        for key, part in _inside(thing):
            seen.add(id(thing))
            yield from _walk(f"{name}.{key}" if name else str(key), part, seen)


def _inside(thing: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(thing, Mapping):
        yield from thing.items()
    elif isinstance(thing, (list, tuple)):
        yield from enumerate(thing)
    elif isinstance(thing, Inert):
        yield from vars(thing).items()


OnFile = Callable[[str, int], None]
"""Called with a file's name and size in bytes before it is read."""


def compare(directory: Path, manifest: Manifest, on_file: OnFile) -> Iterator[Problem]:
    """Yield the tensors that differ from those that were sealed."""
    by_file: dict[str, dict[str, StoredTensor]] = {}
    for tensor in manifest.tensors:
        by_file.setdefault(tensor.file, {})[tensor.name] = tensor
    for name, sealed in by_file.items():
        if (directory / name).is_file():
            on_file(name, (directory / name).stat().st_size)
            yield from _compare_file(directory, name, sealed)


def _compare_file(directory: Path, name: str, sealed: dict[str, StoredTensor]) -> Iterator[Problem]:
    waiting = dict(sealed)
    try:
        for tensor_name, tensor in tensors_in(directory / name):
            before = waiting.pop(tensor_name, None)
            if before is not None and fingerprint_of(tensor) != before.fingerprint:
                shape = "x".join(map(str, before.shape)) or "scalar"
                text = f"{tensor_name} ({before.dtype}, {shape}) in {name} is not the tensor that was sealed"
                yield Problem("changed_tensor", text, name, tensor_name)
    except (VaultError, ValueError) as error:
        yield Problem("unreadable_file", f"{name} could be read when it was sealed, and now: {error}", name)
        return
    for tensor_name in waiting:
        yield Problem("missing_tensor", f"{tensor_name} is no longer in {name}", name, tensor_name)


@dataclass
class Surveyed:
    """What can be said of a checkpoint that nobody sealed."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0
    num_tensors: int = 0


def survey(path: Path, on_file: OnFile) -> Surveyed:
    """Check whether every tensor can be read, and how many values are not finite. Raises OSError."""
    found = Surveyed()
    root = path if path.is_dir() else path.parent
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    for file in files:
        name, size = str(file.relative_to(root)), file.stat().st_size
        found.num_files += 1
        found.num_bytes += size
        on_file(name, size)
        if holds_tensors(name) or not path.is_dir():
            _survey_file(file, name, found)
    return found


def _survey_file(file: Path, name: str, found: Surveyed) -> None:
    try:
        for tensor_name, tensor in tensors_in(file):
            found.num_tensors += 1
            if bad := count_nonfinite(tensor):
                text = f"{tensor_name} in {name}: {bad} of {tensor.numel()} values are NaN or infinite"
                found.problems.append(Problem("nonfinite_tensor", text, name, tensor_name))
        if named := _named_code(file):
            text = f"{name} names code that whoever loads it would run ({named[0]}); nothing was run here"
            found.problems.append(Problem("names_code", text, name))
    except (VaultError, ValueError) as error:
        if _is_meant_to_hold_tensors(file):
            found.problems.append(Problem("unreadable_file", str(error), name))
        else:
            found.notes.append(f"{error}: whether it holds tensors is not known")


def _is_meant_to_hold_tensors(file: Path) -> bool:
    """Whether the file's format says that it holds tensors; a name such as `.bin` may be used for anything."""
    with file.open("rb") as opened:
        return file.suffix not in TORCH_SAVED or opened.read(2) == b"PK"


def _load(source: Path | bytes) -> Any:
    """Return the objects of a file, or of a piece of one. Raises VaultError, or whatever error a damaged one causes."""
    if isinstance(source, Path):
        with source.open("rb") as file, zipfile.ZipFile(file) as archive:
            # Each touched page is a private copy, because torch wants writable memory.
            return _reader(archive, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)).load()
    with zipfile.ZipFile(io.BytesIO(source)) as archive:
        return _reader(archive, bytearray(source)).load()


def _named_code(path: Path) -> list[str]:
    """Return names in a file of torch.save that would act if somebody else loaded it."""
    if path.suffix not in TORCH_SAVED:
        return []
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        reader = _reader(archive, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        reader.load()
        return reader.named_code


def _reader(archive: zipfile.ZipFile, buffer: mmap.mmap | bytearray) -> "_Reader":
    objects = next((name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"), None)
    if objects is None:
        raise VaultError("it is a zip file, but not one of torch.save's")
    order = objects.removesuffix("data.pkl") + "byteorder"
    if order in archive.namelist() and _stored(archive, order, len(buffer)).decode() != sys.byteorder:
        raise VaultError("it was written on a machine with another byte order")
    return _Reader(archive, buffer, objects)


def _stored(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
        raise VaultError(f"{name.rpartition('/')[2]} does not lie in the file as it should")
    return archive.read(name)


class _Reader(InertUnpickler):
    def __init__(self, archive: zipfile.ZipFile, buffer: mmap.mmap | bytearray, objects: str) -> None:
        super().__init__(_stored(archive, objects, len(buffer)))
        self._archive, self._buffer, self._folder = archive, buffer, objects.removesuffix("data.pkl")

    def plain(self, module: str, name: str) -> Any:
        """Make tensors as torch does; the rest is as in every pickle."""
        if module == "torch._utils" and name in _REBUILD:
            return _REBUILD[name]
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return lambda make, _type, arguments, _state: make(*arguments)
        if module in {"torch", "torch.storage"} and name.endswith("Storage"):
            return _DTYPES.get(name.removesuffix("Storage"), torch.uint8)
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else super().plain(module, name)

    def persistent_load(self, key: Any) -> _Storage:
        """Return a storage; the key is ('storage', type, name, device, elements)."""
        _, dtype, name, *_ = key
        entry = self._archive.getinfo(f"{self._folder}data/{name}")
        names, extra = _LOCAL_HEADER.unpack_from(self._buffer, entry.header_offset)
        start = entry.header_offset + _LOCAL_HEADER.size + names + extra
        if entry.compress_type != zipfile.ZIP_STORED or start + entry.file_size > len(self._buffer):
            raise VaultError(f"storage {name} does not lie in the file as it should")
        if not entry.file_size:
            return torch.empty(0, dtype=torch.uint8), dtype
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=entry.file_size, offset=start), dtype


def _tensor(storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    content, dtype = storage
    elements, told = content.view(dtype), math.prod(size)
    # An expanded tensor repeats what is stored; one that repeats it without end belongs to no model.
    if told > MAX_REPEATS * max(1, elements.numel()):
        raise VaultError(f"a tensor of {told} elements has {elements.numel()} in the file")
    return torch.as_strided(elements, tuple(size), tuple(stride), offset)


def _tensor_of_dtype(storage: _Storage, offset: int, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    """Make a tensor of a dtype that was added after typed storages: (…, requires_grad, hooks, dtype)."""
    return _tensor((storage[0], rest[2]), offset, size, stride)


_REBUILD = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_tensor_v3": _tensor_of_dtype,
    "_rebuild_parameter": lambda data, *_: data,
    "_rebuild_parameter_with_state": lambda data, *_: data,
}
