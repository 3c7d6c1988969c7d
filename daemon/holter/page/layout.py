"""What lies where in a page, version 2. Little-endian, 64-bit words; whoever changes a line of this table raises `VERSION`.

    offset  bytes  field                          written by
         0      8  magic, "HOLTERPG"              rank, once
         8      8  version                        rank, once
        16      8  rank                           rank, once
        24      8  world_size                     rank, once
        32      8  pid                            rank, once
        40      8  started_ticks                  rank, once
        48      8  ring_bytes                     rank, once
        56      8  crc32 of bytes 0 to 55         rank, once
        64      8  heartbeat: sequence            rank
        72      8    slot 0: check                rank
        80     32    slot 0: step, phase, micro_step, at_ns
       112      8    slot 1: check                rank
       120     32    slot 1: as slot 0
       192      8  write position                 rank
       200      8  dropped                        rank
       256      8  read position: sequence        sidecar; the rank, once
       264      8    slot 0: check                sidecar
       272      8    slot 0: position
       280      8    slot 1: check                sidecar; the rank, once
       288      8    slot 1: as slot 0
       320      8  control: sequence              sidecar
       328      8    slot 0: check                sidecar
       336     16    slot 0: code, argument
       352      8    slot 1: check                sidecar
       360     16    slot 1: as slot 0
       384      8  sidecar: sequence              sidecar
       392      8    slot 0: check                sidecar
       400     16    slot 0: pid, at_ns
       416      8    slot 1: check                sidecar
       424     16    slot 1: as slot 0
       448      8  notice: sequence               sidecar
       456      8    slot 0: check                sidecar
       464   1024    slot 0: UTF-8, padded with zeros
      1488      8    slot 1: check                sidecar
      1496   1024    slot 1: as slot 0
      4096      8  rewind, even steps: sequence   rank
      4104      8    slot 0: check                rank
      4112      8    slot 0: length
      4120  32768    slot 0: step, and how it began
     36888      8    slot 1: check                rank
     36896      8    slot 1: length
     36904  32768    slot 1: as slot 0
     69696      …  rewind, odd steps: as for even ones
    139264      …  ring, ring_bytes long          rank

Gaps are zero; what the two sides write never shares a cache line. Numbers in slots are signed, all others, and positions, unsigned.

Positions count bytes since the page was made and only grow; position p lies at ring offset p % ring_bytes. A record is one
header word, `check << 32 | length`, and the payload, padded to 8 bytes; a payload that meets the end of the ring goes on at its
beginning. The check is the payload's crc32 XOR (p + 1), so that a record of an earlier lap is not taken for one at p, nor
zeroed memory for an empty record. A record exists once the write position has passed it.

A sequence with its two slots is a latch: one value, one publisher, any number of readers, no waiting, never half a value. Value n goes
to slot n & 1 and is there once the sequence says n. While n is being written, n - 1 stays whole in the other slot, so a publisher that is
killed halfway still shows what it said before. The check is the body's crc32 seeded with n: a body that was overwritten during the read,
or whose stores arrived out of order (no barrier is to be had from Python; x86 needs none), or whose bits flipped, does not match the
sequence and is read again, a few times, then called torn.
"""

import functools
import mmap
import struct
import sys
from collections.abc import Callable
from typing import Any
from zlib import crc32

import msgspec

from holter.errors import PageError, TornPageError

_publish: Callable[[memoryview, bytes], None] | None
try:
    from holter.page._latch import publish as _publish
except ImportError:
    # The extension is missing if there was no compiler at installation.
    _publish = None

MAGIC = b"HOLTERPG"
VERSION = 2
WORD_BYTES = 8
ATTEMPTS = 8
"""Number of times that a reader tries again before it calls a value torn. A publisher needs a microsecond; a dead one
is not waited for."""

HEARTBEAT_OFFSET = 64
WRITE_POSITION_OFFSET = 192
DROPPED_OFFSET = 200
READ_POSITION_OFFSET = 256
CONTROL_OFFSET = 320
SIDECAR_OFFSET = 384
NOTICE_OFFSET = 448
REWIND_OFFSETS = (4096, 69696)
RING_OFFSET = 139264

READ_POSITION = struct.Struct("<Q")
HEARTBEAT = struct.Struct("<4q")
CONTROL = struct.Struct("<2q")
SIDECAR = struct.Struct("<2q")
NOTICE_BYTES = 1024
NOTICE = struct.Struct(f"<{NOTICE_BYTES}s")
REWIND_BYTES = 1 << 15
REWIND_STEP = struct.Struct("<q")

MIN_RING_BYTES = 64
MAX_RING_BYTES = 1 << 30

WRITE_POSITION = WRITE_POSITION_OFFSET // WORD_BYTES
DROPPED = DROPPED_OFFSET // WORD_BYTES

_MASK_32 = (1 << 32) - 1
_MAX_64 = (1 << 64) - 1
_IDENTITY = struct.Struct("<8s6Q")
_IDENTITY_CHECK = struct.Struct("<Q")
_IDENTITY_BYTES = _IDENTITY.size + _IDENTITY_CHECK.size

CONTROL_NOTHING = 0
CONTROL_THIN = 1
"""Control code of the sidecar: the ring overflows, so compare 2**argument times less often."""


class PageIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a page: whose it is and how large; the fields are in the order of the table."""

    version: int = VERSION
    rank: int
    world_size: int
    pid: int
    started_ticks: int
    """Start of the process in clock ticks since boot. Together with the pid it identifies the process, because pids are
    reused."""
    ring_bytes: int

    @property
    def page_bytes(self) -> int:
        """Size of the whole page in bytes."""
        return RING_OFFSET + self.ring_bytes


class Page:
    """A mapped page, accessible as bytes, as words and through its latches.

    Words are read and written as `words[i]`, which is one aligned copy of 8 bytes and so never half a word;
    `struct.pack_into` goes byte by byte. There is no `close`: the mapping goes away when the last thread that still
    holds the page lets go.
    """

    __slots__ = ("control", "heartbeat", "notice", "read_position", "rewinds", "ring", "sidecar", "words")

    def __init__(self, mapped: mmap.mmap, ring_bytes: int) -> None:
        data = memoryview(mapped)
        self.words = data.cast("Q")
        self.ring = data[RING_OFFSET : RING_OFFSET + ring_bytes]
        self.heartbeat = Latch(data, self.words, HEARTBEAT_OFFSET, HEARTBEAT)
        self.read_position = Latch(data, self.words, READ_POSITION_OFFSET, READ_POSITION)
        self.control = Latch(data, self.words, CONTROL_OFFSET, CONTROL)
        self.sidecar = Latch(data, self.words, SIDECAR_OFFSET, SIDECAR)
        self.notice = Latch(data, self.words, NOTICE_OFFSET, NOTICE)
        self.rewinds = [BlobLatch(data, self.words, offset, REWIND_BYTES) for offset in REWIND_OFFSETS]


def record_bytes(length: int) -> int:
    """Return the bytes that a payload of this length takes up in the ring: header, payload and padding."""
    return (length + 2 * WORD_BYTES - 1) & -WORD_BYTES


def record_header(payload_crc: int, length: int, position: int) -> int:
    """Return the header word of a record at this position."""
    return ((payload_crc ^ (position + 1)) & _MASK_32) << 32 | length


def require_little_endian() -> None:
    """Refuse a machine on which words would read differently than the table says."""
    if sys.byteorder != "little":
        raise PageError("the shared page needs a little-endian machine, and this one is big-endian")


def find_flaw(identity: PageIdentity) -> str | None:
    """Return why no page can have this identity, as the end of a sentence; None if it is valid."""
    if not MIN_RING_BYTES <= identity.ring_bytes <= MAX_RING_BYTES or identity.ring_bytes % WORD_BYTES:
        return (
            f"ring_bytes must be a multiple of {WORD_BYTES} from {MIN_RING_BYTES} to {MAX_RING_BYTES}, "
            f"got {identity.ring_bytes}"
        )
    if not 0 <= identity.rank < identity.world_size <= _MAX_64:
        return f"rank must be at least 0 and below world_size, got {identity.rank} of {identity.world_size}"
    for name, value in (("pid", identity.pid), ("started_ticks", identity.started_ticks)):
        if not 0 <= value <= _MAX_64:
            return f"{name} must fit an unsigned 64-bit word, got {value}"
    return None


def encode_identity(identity: PageIdentity) -> bytes:
    """Return the first 64 bytes of a page."""
    fields = _IDENTITY.pack(MAGIC, *msgspec.structs.astuple(identity))
    return fields + _IDENTITY_CHECK.pack(crc32(fields))


def decode_identity(header: bytes, file_bytes: int) -> PageIdentity:
    """Decode the identity of a page from its header and the size of its file.

    Raises PageError if it is no page of ours, and TornPageError if it is one but broken.
    """
    if file_bytes < RING_OFFSET + MIN_RING_BYTES:
        raise PageError(f"not a page: {file_bytes} bytes are too few, the smallest has {RING_OFFSET + MIN_RING_BYTES}")
    fields = header[: _IDENTITY.size]
    magic, version, rank, world_size, pid, started_ticks, ring_bytes = _IDENTITY.unpack(fields)
    if magic != MAGIC:
        raise PageError(f"not a page: it begins with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise PageError(f"a page of version {version}, and this holter reads version {VERSION}")
    (check,) = _IDENTITY_CHECK.unpack(header[_IDENTITY.size : _IDENTITY_BYTES])
    if check != crc32(fields):
        raise TornPageError(f"a torn page: its header's checksum is {crc32(fields):#010x}, and it says {check:#010x}")
    identity = PageIdentity(
        rank=rank, world_size=world_size, pid=pid, started_ticks=started_ticks, ring_bytes=ring_bytes
    )
    if (flaw := find_flaw(identity)) is not None:
        raise TornPageError(f"a torn page: {flaw}")
    if file_bytes != identity.page_bytes:
        raise TornPageError(f"a torn page: its size is {file_bytes} bytes, and its header says {identity.page_bytes}")
    return identity


class Latch:
    """A place in the page at which the latest value of something is published."""

    __slots__ = ("_checks", "_form", "_seen", "_sequence", "_slots", "_words", "put")

    def __init__(self, data: memoryview, words: memoryview, offset: int, form: struct.Struct) -> None:
        starts = (offset + WORD_BYTES, offset + 2 * WORD_BYTES + form.size)
        self._form = form
        whole = data[offset : starts[1] + WORD_BYTES + form.size]
        self._words = words
        self._sequence = offset // WORD_BYTES
        self._checks = tuple(start // WORD_BYTES for start in starts)
        self._slots = tuple(data[start + WORD_BYTES : start + WORD_BYTES + form.size] for start in starts)
        self._seen = 0
        self.put: Callable[[bytes], None] = (
            self.publish_by_python if _publish is None else functools.partial(_publish, whole)
        )
        """Replace the value by one that is packed already."""

    @property
    def is_written(self) -> bool:
        """Whether anything was ever published."""
        return self._words[self._sequence] != 0

    def publish(self, *values: int | bytes) -> None:
        """Replace the value. Only one thread may publish; a restarted publisher continues the count of the previous one."""
        self.put(self._form.pack(*values))

    def publish_by_python(self, body: bytes) -> None:
        """Publish by Python alone: the definition of what the C extension does, and its replacement."""
        sequence = (self._words[self._sequence] + 1) & _MAX_64
        side = sequence & 1
        self._slots[side][:] = body
        self._words[self._checks[side]] = crc32(body, sequence & _MASK_32)
        self._words[self._sequence] = sequence

    def read(self) -> tuple[Any, ...] | None:
        """Return the latest value; None if it is torn."""
        for _ in range(ATTEMPTS):
            sequence = self._words[self._sequence]
            side = sequence & 1
            body = self._slots[side].tobytes()
            if self._words[self._checks[side]] == crc32(body, sequence & _MASK_32):
                self._seen = sequence
                return self._form.unpack(body)
        return None

    def read_new(self) -> tuple[Any, ...] | None:
        """Return the latest value if it was not read before.

        None if there is nothing new, or if it is torn; then the next call tries again.
        """
        if self._words[self._sequence] == self._seen:
            return None
        return self.read()


class BlobLatch:
    """A latch for a value of varying length, published by one thread: only the used part is written, checked and read."""

    __slots__ = ("_bodies", "_checks", "_limit", "_sequence", "_words")

    def __init__(self, data: memoryview, words: memoryview, offset: int, limit: int) -> None:
        starts = (offset + WORD_BYTES, offset + 3 * WORD_BYTES + limit)
        self._limit = limit
        self._words = words
        self._sequence = offset // WORD_BYTES
        self._checks = tuple(start // WORD_BYTES for start in starts)
        self._bodies = tuple(data[start + 2 * WORD_BYTES : start + 2 * WORD_BYTES + limit] for start in starts)

    @staticmethod
    def num_bytes(limit: int) -> int:
        """Return the bytes that a latch of this limit, a multiple of 8, takes up in the page."""
        return WORD_BYTES + 2 * (2 * WORD_BYTES + limit)

    def publish(self, body: bytes) -> bool:
        """Replace the value; False if it is too long, in which case the previous value stays."""
        length = len(body)
        if length > self._limit:
            return False
        sequence = (self._words[self._sequence] + 1) & _MAX_64
        side = sequence & 1
        self._bodies[side][:length] = body
        self._words[self._checks[side] + 1] = length
        self._words[self._checks[side]] = crc32(body, sequence & _MASK_32)
        self._words[self._sequence] = sequence
        return True

    def read(self) -> bytes | None:
        """Return the latest value, empty before the first; None if it is torn."""
        for _ in range(ATTEMPTS):
            sequence = self._words[self._sequence]
            if sequence == 0:
                return b""
            side = sequence & 1
            body = self._bodies[side][: min(self._words[self._checks[side] + 1], self._limit)].tobytes()
            if self._words[self._checks[side]] == crc32(body, sequence & _MASK_32):
                return body
        return None
