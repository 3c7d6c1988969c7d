"""What the ranks reported, kept so that `holter replay` can judge it again.

    journal/0000.msgpack   who they are: Attached, Seated, Census, Exited; never deleted
    journal/0001.msgpack   everything else, in order of arrival; the oldest of these files goes when the whole grows too large
    ...
    a file: [MARK][length: u32][CRC-32 of what follows: u32][Entry as msgpack] ...   (little-endian)

A healthy step costs an append to a buffer: no write, no fsync. A crash leaves a torn tail, and disks flip bits: the reader goes on at the next
MARK whose checksum holds, so that each damage costs the entry that it hit, and says how much was lost. Ranks of one model send the same
census: it is written once, and the others refer to it.
"""

import contextlib
import hashlib
import heapq
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec

from holter import clock
from holter.coordinator.disk import Disk
from holter.files import UNREADABLE
from holter.records import Attached, Census, Exited, Observation, Seated, StepsDone
from holter.records.joined import apart

IDENTITY = 0
"""Number of the identity file, which is kept."""
MAX_BUFFER_BYTES = 16 * 2**20
"""Largest size in bytes of what waits for the disk; records beyond it are dropped and counted. A step of 16,000 ranks
takes 4 MiB."""
MARK = b"\xc1hlt"
"""Beginning of a frame; no msgpack value begins with 0xc1."""
SMALL_BYTES = 4096
"""Entries on how a rank attached or ended are smaller than this; a complete census is larger, or does no harm."""
CENSUS_SHARE = 0.75
"""Share of the identity file that large entries may take."""

SEARCH_BYTES = 2**16
MAX_WASTED_BYTES = 2**30
"""Largest number of bytes read in vain in a file that only looks like a journal: seconds, not hours."""

_SEGMENT = re.compile(r"[0-9]{4,12}\.msgpack")
_HEADER = struct.Struct(f"<{len(MARK)}sII")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One observation, with the time at which the coordinator received it, by its own clock."""

    received_ns: int
    observation: Observation
    same_as: bytes = b""
    """Digest of an equal census that was written before, whose entries are left out here; empty otherwise."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Entry)


class Journal:
    """Journal of a run: appended and flushed by one thread, written by the disk's thread."""

    def __init__(self, folder: Path, limit_bytes: int = 64 * 2**20, num_segments: int = 8) -> None:
        self.dropped = 0
        """Number of entries that never reached the disk, at least."""
        self.num_damaged = 0
        """Number of files of a former coordinator in which something was damaged."""
        self.folder = folder
        # Half for identity, half for the stream: a census of many ranks must not displace the steps, nor grow without
        # end.
        self._identity_limit = limit_bytes // 2
        self._segment_limit = limit_bytes // 2 // num_segments
        self._num_segments = num_segments
        self._buffers: dict[bool, list[bytes]] = {True: [], False: []}
        self._buffered_bytes = 0
        self._is_writing = False
        self._known: set[bytes] = set()
        self._censuses: set[bytes] = set()
        """Digests of censuses that were written."""
        self._segment = max((number for number, _ in segments(folder)), default=IDENTITY)

    def append(self, received_ns: int, observation: Observation) -> None:
        """Keep an observation in the buffer, without a system call."""
        is_identity = isinstance(observation.body, Attached | Seated | Census | Exited)
        if is_identity and self._is_known(observation):
            return
        content = _ENCODER.encode(self._entry(received_ns, observation))
        if self._buffered_bytes + len(content) > MAX_BUFFER_BYTES:
            self.dropped += 1
            return
        self._buffers[is_identity].append(_HEADER.pack(MARK, len(content), zlib.crc32(content)) + content)
        self._buffered_bytes += len(content)

    def _entry(self, received_ns: int, observation: Observation) -> Entry:
        if not isinstance(observation.body, Census):
            return Entry(received_ns, observation)
        digest = _digest(observation.body)
        if digest not in self._censuses:
            self._censuses.add(digest)
            return Entry(received_ns, observation)
        short = msgspec.structs.replace(observation.body, entries=[], backward_order=[], components=[])
        return Entry(received_ns, msgspec.structs.replace(observation, body=short), digest)

    @property
    def is_filling(self) -> bool:
        """Whether the buffer should be flushed before its regular time."""
        return self._buffered_bytes > MAX_BUFFER_BYTES // 16

    def flush(self, disk: Disk, *, is_now: bool = False) -> None:
        """Give the buffer to the disk; not while the last write is in progress, unless `is_now`."""
        if (self._is_writing and not is_now) or not self._buffered_bytes:
            return
        full, self._buffers = self._buffers, {True: [], False: []}
        self._buffered_bytes = 0
        self._is_writing = True
        if not disk.submit(lambda: self._write(full)):
            self._is_writing = False
            self.dropped += sum(len(entries) for entries in full.values())

    def _is_known(self, observation: Observation) -> bool:
        """Whether this identity was written before, because a sidecar introduces itself at every connection."""
        digest = _digest(observation)
        if digest in self._known:
            return True
        self._known.add(digest)
        return False

    def _write(self, full: dict[bool, list[bytes]]) -> None:
        """Write buffers; runs in the disk's thread."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        kept_back = int(self._identity_limit * (1 - CENSUS_SHARE))
        fitting: list[bytes] = []
        for entry in entries:
            if room - len(entry) >= (kept_back if len(entry) > SMALL_BYTES else 0):
                fitting.append(entry)
                room -= len(entry)
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


def written_ns(folder: Path) -> int:
    """Return when the journal was last written to, by the run's clock; 0 if there is none or that is not known."""
    with contextlib.suppress(OSError):
        return max((path.stat().st_mtime_ns for _, path in segments(folder)), default=0)
    return 0


def segments(folder: Path) -> list[tuple[int, Path]]:
    """Return the numbers and paths of the journal's files, oldest first; pipes and devices among them are ignored."""
    return sorted(
        (int(path.stem), path)
        for path in folder.glob("[0-9]*.msgpack")
        if _SEGMENT.fullmatch(path.name) and path.is_file()
    )


def read(folder: Path, damage: list[str] | None = None, *, is_joined: bool = False) -> Iterator[Entry]:
    """Yield everything that was kept, in order of arrival. Raises OSError.

    Damaged parts are left out, and described in `damage` with a sentence for each file. With `is_joined`, steps that a
    host's agent joined stay joined, which is quicker; otherwise each is read as what every rank said.
    """
    damage = [] if damage is None else damage
    paths = [path for _, path in segments(folder)]
    identity = [path for path in paths if int(path.stem) == IDENTITY]
    stream = [path for path in paths if int(path.stem) != IDENTITY]
    entries = heapq.merge(_entries(identity, damage), _entries(stream, damage), key=lambda entry: entry.received_ns)
    return entries if is_joined else (one for entry in entries for one in _apart(entry))


def _entries(paths: Iterable[Path], damage: list[str]) -> Iterator[Entry]:
    return chain.from_iterable(_read_segment(path, damage) for path in paths)


def _read_segment(path: Path, damage: list[str]) -> Iterator[Entry]:
    censuses: dict[bytes, Census] = {}
    num_unreadable = num_places = 0
    with path.open("rb") as file:
        for content in _frames(file):
            if content is None:
                num_places += 1
                continue
            try:
                yield _sound(_whole(_DECODER.decode(content), censuses))
            except (*UNREADABLE, KeyError):
                num_unreadable += 1
    if num_places or num_unreadable:
        places = f"{num_places} place{'s' if num_places != 1 else ''} damaged"
        damage.append(f"{path.name}: {places}, {num_unreadable} entries could not be read; all others were")


def _whole(entry: Entry, censuses: dict[bytes, Census]) -> Entry:
    """Restore the census that an entry refers to; KeyError if it is lost."""
    body = entry.observation.body
    if not isinstance(body, Census):
        return entry
    if not entry.same_as:
        censuses[_digest(body)] = body
        return entry
    observation = msgspec.structs.replace(entry.observation, body=censuses[entry.same_as])
    return Entry(entry.received_ns, observation)


def _sound(entry: Entry) -> Entry:
    """Return the entry; KeyError if the columns of a joined step do not fit together."""
    joined = entry.observation.body
    if isinstance(joined, StepsDone) and not joined.is_sound:
        raise KeyError(entry.observation.rank)
    return entry


def _apart(entry: Entry) -> list[Entry]:
    """Split a step of several ranks into what each of them said."""
    joined = entry.observation.body
    if not isinstance(joined, StepsDone):
        return [entry]
    step = entry.observation.step
    return [
        Entry(entry.received_ns, Observation(rank=rank, step=step, at_ns=at_ns, body=done))
        for rank, at_ns, done in apart(joined)
    ]


def _frames(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the content of each frame whose checksum holds; None for each stretch that was skipped."""
    is_skipping, wasted = False, 0
    while header := file.read(_HEADER.size):
        start = file.tell() - len(header)
        content = _content(file, header)
        if content is not None:
            is_skipping = False
            yield content
            continue
        if not is_skipping:
            yield None
        is_skipping, wasted = True, wasted + file.tell() - start
        if wasted > MAX_WASTED_BYTES or not _seek_mark(file, start + 1):
            return


def _content(file: BinaryIO, header: bytes) -> bytes | None:
    if len(header) < _HEADER.size:
        return None
    mark, length, checksum = _HEADER.unpack(header)
    if mark != MARK or length > MAX_BUFFER_BYTES:
        return None
    content = file.read(length)
    return content if len(content) == length and zlib.crc32(content) == checksum else None


def _seek_mark(file: BinaryIO, start: int) -> bool:
    """Go to the next MARK at or behind `start`; False if there is none."""
    while True:
        file.seek(start)
        block = file.read(SEARCH_BYTES)
        found = block.find(MARK)
        if found >= 0:
            file.seek(start + found)
            return True
        if len(block) < SEARCH_BYTES:
            return False
        start += SEARCH_BYTES - len(MARK) + 1


def _digest(record: msgspec.Struct) -> bytes:
    return hashlib.blake2b(_ENCODER.encode(record), digest_size=16).digest()


def _append(path: Path, entries: list[bytes]) -> None:
    """Append all entries or none: what a full disk took of them is cut off again."""
    if not entries:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        try:
            rest = memoryview(b"".join(entries))
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            # The host's clock may have been set, but later questions are about the run's clock.
            now_ns = clock.wall_ns()
            os.utime(descriptor, ns=(now_ns, now_ns))
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
