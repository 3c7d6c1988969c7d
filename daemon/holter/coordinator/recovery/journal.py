"""What the ranks reported, kept so that `holter replay` can judge it again.

    journal/0000.msgpack   who they are: Attached, Census, Exited; never deleted
    journal/0001.msgpack   everything else, in order of arrival; the oldest of these files goes when the whole grows too large
    ...
    a file: [length: u32 little-endian][Entry as msgpack] ...

A healthy step costs an append to a buffer: no write, no fsync. A crash leaves a torn tail, which the reader stops at.
"""

import hashlib
import heapq
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from holter.coordinator.disk import Disk
from holter.records import Attached, Census, Exited, Observation

IDENTITY = 0
"""Number of the file that is kept."""
MAX_BUFFER_BYTES = 16 * 2**20
"""What may wait for the disk; beyond it records are dropped and counted. A step of 16,000 ranks takes 4 MiB."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One observation and when the coordinator received it, by its own clock."""

    received_ns: int
    observation: Observation


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Entry)


class Journal:
    """Append and flush from one thread; the disk's thread writes."""

    def __init__(self, folder: Path, limit_bytes: int = 64 * 2**20, num_segments: int = 8) -> None:
        self.dropped = 0
        """Entries that never reached the disk, at least."""
        self.folder = folder
        # Half for identity, half for the stream: a census of many ranks must not push the steps out, nor grow for ever.
        self._identity_limit = limit_bytes // 2
        self._segment_limit = limit_bytes // 2 // num_segments
        self._num_segments = num_segments
        self._buffers: dict[bool, list[bytes]] = {True: [], False: []}
        self._buffered_bytes = 0
        self._is_writing = False
        self._known: set[bytes] = set()
        self._segment = max((number for number, _ in segments(folder)), default=IDENTITY)

    def append(self, received_ns: int, observation: Observation) -> None:
        """Keep one; costs no system call."""
        is_identity = isinstance(observation.body, Attached | Census | Exited)
        if is_identity and self._is_known(observation):
            return
        content = _ENCODER.encode(Entry(received_ns, observation))
        if self._buffered_bytes + len(content) > MAX_BUFFER_BYTES:
            self.dropped += 1
            return
        self._buffers[is_identity].append(len(content).to_bytes(4, "little") + content)
        self._buffered_bytes += len(content)

    @property
    def is_filling(self) -> bool:
        """Better flushed now than when its time comes."""
        return self._buffered_bytes > MAX_BUFFER_BYTES // 16

    def flush(self, disk: Disk, *, is_now: bool = False) -> None:
        """Hand what is buffered to the disk, unless it is still busy with what it was given before and it need not be now."""
        if (self._is_writing and not is_now) or not self._buffered_bytes:
            return
        full, self._buffers = self._buffers, {True: [], False: []}
        self._buffered_bytes = 0
        self._is_writing = True
        if not disk.submit(lambda: self._write(full)):
            self._is_writing = False
            self.dropped += sum(len(entries) for entries in full.values())

    def _is_known(self, observation: Observation) -> bool:
        """A sidecar introduces itself anew at every connection; once is enough here."""
        digest = hashlib.blake2b(_ENCODER.encode(observation), digest_size=16).digest()
        if digest in self._known:
            return True
        self._known.add(digest)
        return False

    def _write(self, full: dict[bool, list[bytes]]) -> None:
        """In the disk's thread."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_identity(full.pop(True))
            self._write_stream(full.pop(False))
        except OSError:
            self.dropped += 1 + sum(len(entries) for entries in full.values())
            raise
        finally:
            self._is_writing = False

    def _write_identity(self, entries: list[bytes]) -> None:
        path = self._path(IDENTITY)
        room = self._identity_limit - (path.stat().st_size if path.exists() else 0)
        fitting: list[bytes] = []
        for entry in entries:
            room -= len(entry)
            if room >= 0:
                fitting.append(entry)
        self.dropped += len(entries) - len(fitting)
        _append(path, fitting)

    def _write_stream(self, entries: list[bytes]) -> None:
        path = self._path(max(self._segment, IDENTITY + 1))
        if path.exists() and path.stat().st_size >= self._segment_limit:
            self._segment = max(self._segment, IDENTITY + 1) + 1
            path = self._path(self._segment)
        _append(path, entries)
        stream = [old for number, old in segments(self.folder) if number != IDENTITY]
        for old in stream[: -self._num_segments]:
            old.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:04d}.msgpack"


def segments(folder: Path) -> list[tuple[int, Path]]:
    """The journal's files, oldest first."""
    return sorted((int(path.stem), path) for path in folder.glob("[0-9]*.msgpack") if path.stem.isdigit())


def read(folder: Path, damage: list[str] | None = None) -> Iterator[Entry]:
    """Everything that was kept, in order of arrival; a torn or damaged file is read up to the damage, which is told to `damage`."""
    damage = [] if damage is None else damage
    paths = [path for _, path in segments(folder)]
    identity = [path for path in paths if int(path.stem) == IDENTITY]
    stream = [path for path in paths if int(path.stem) != IDENTITY]
    return heapq.merge(_entries(identity, damage), _entries(stream, damage), key=lambda entry: entry.received_ns)


def _entries(paths: Iterable[Path], damage: list[str]) -> Iterator[Entry]:
    return chain.from_iterable(_read_segment(path, damage) for path in paths)


def _read_segment(path: Path, damage: list[str]) -> Iterator[Entry]:
    with path.open("rb") as file:
        while prefix := file.read(4):
            length = int.from_bytes(prefix, "little")
            content = file.read(length) if length <= MAX_BUFFER_BYTES else b""
            try:
                entry = _DECODER.decode(content)
            except msgspec.MsgspecError:
                damage.append(f"{path.name} is torn or damaged after {file.tell() - len(content) - len(prefix)} bytes")
                return
            yield entry


def _append(path: Path, entries: list[bytes]) -> None:
    """All entries or none: what a full disk took of them is cut off again."""
    if not entries:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        try:
            rest = memoryview(b"".join(entries))
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
