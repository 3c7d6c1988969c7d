"""Reading and writing JSON files, and writing files so that they are on the disk completely or not at all."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MAX_BYTES = 256 * 2**20
"""Largest file in bytes that is read at once; even the manifest of 16,000 ranks is smaller."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for malformed bytes."""


def read_json(path: Path, kind: type[T]) -> T | None:
    """Decode a JSON file; None if there is none, or if it cannot be decoded as this type."""
    try:
        return msgspec.json.decode(read_plain(path), type=kind)
    except (OSError, *UNREADABLE):
        return None


def read_plain(path: Path) -> bytes:
    """Read a regular file. Raises OSError, also for a pipe, which would block, and for a device or an endless file."""
    # Without O_NONBLOCK the open itself would wait for a writer of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        if about.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, "is too large", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_BYTES)
    finally:
        os.close(descriptor)


def as_json(record: msgspec.Struct) -> bytes:
    """Encode a record for a file that people read: as indented JSON."""
    return msgspec.json.format(encoded(record, msgspec.json.encode), indent=2) + b"\n"


def encoded(record: msgspec.Struct, encode: Callable[[Any], bytes]) -> bytes:
    r"""A record in msgpack or JSON, whatever its strings are: names of files and arguments may hold bytes that are no text, which then read `\udcff`."""
    try:
        return encode(record)
    except UnicodeEncodeError:
        return encode(_as_text(msgspec.to_builtins(record, builtin_types=(bytes,))))


def _as_text(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_as_text(key): _as_text(one) for key, one in value.items()}
        case list() | tuple():
            return [_as_text(one) for one in value]
        case _:
            return value


def write_whole(path: Path, content: bytes, mode: int = 0o644, *, makes_folder: bool = False) -> None:
    """Write a temporary file beside it, then rename. Raises OSError; the previous content is then still there."""
    if makes_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # A link that somebody laid there, for the name can be guessed, is not written through.
        if beside.is_symlink():
            beside.unlink()
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make sure that a folder's names are on the disk; file systems that cannot do that are ignored."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
