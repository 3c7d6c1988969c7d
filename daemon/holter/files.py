"""Files of JSON, and files that are there whole, and on the disk, or not at all."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

MAX_BYTES = 256 * 2**20
"""No file of a run directory that is read at once is larger; a manifest of 16,000 ranks is not."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises over bytes that are not what they should be."""


def read_json(path: Path, kind: type[T]) -> T | None:
    """What the file says; None where there is none, or it cannot be read as this."""
    try:
        return msgspec.json.decode(read_plain(path), type=kind)
    except (OSError, *UNREADABLE):
        return None


def read_plain(path: Path) -> bytes:
    """The content of a plain file. Raises OSError: for a pipe, which would be waited for, and for a device or a file without end, too."""
    # O_NONBLOCK: the open itself waits for who writes to a pipe.
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
    """For a file that people open."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def write_whole(path: Path, content: bytes, mode: int = 0o644, *, makes_folder: bool = False) -> None:
    """Write beside it, then rename. Raises OSError; what was there before is then still there."""
    if makes_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
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
    """A name is on the disk when its folder is; file systems that cannot do that are not the caller's trouble."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
