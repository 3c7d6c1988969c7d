"""The rank's side of the page: every call returns at once, whatever state the sidecar is in.

Once the page is made, nothing here blocks, grows, or raises into the training loop. What cannot be written is dropped
and counted: if the ring is full, the payload is larger than the ring, another thread or the frame under a signal
handler is already writing, or the read position is one that no reader of ours leaves behind.
"""

import errno
import fcntl
import functools
import itertools
import mmap
import os
import struct
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Self
from zlib import crc32

from holter.errors import PageError
from holter.page.layout import (
    DROPPED,
    HEARTBEAT,
    REWIND_STEP,
    RING_OFFSET,
    WORD_BYTES,
    WRITE_POSITION,
    Page,
    PageIdentity,
    encode_identity,
    find_flaw,
    record_bytes,
    record_header,
    require_little_endian,
)

_RING_WORD = RING_OFFSET // WORD_BYTES


class PageWriter:
    """Writes what a rank reports, and reads what the sidecar tells it."""

    def __init__(self, fd: int, page: Page, ring_bytes: int) -> None:
        self.fd = fd
        """Descriptor for the sidecar, by inheritance or as /proc/PID/fd/N; -1 once closed."""
        self._page: Page | None = page
        self._ring_bytes = ring_bytes
        self._position = 0
        self._free_until = ring_bytes
        # Two locks, so that the beat of one thread does not cost the record of another. They are taken by
        # acquire(False): acquire(blocking=False) takes four times as long, 0.6 us. If a KeyboardInterrupt falls exactly
        # between an acquire and its try, the lock stays taken, and all that follows is dropped and counted.
        self._beat_lock = threading.Lock()
        self._ring_lock = threading.Lock()
        self._drop_numbers = itertools.count(1)
        self._dropped = 0
        self._control = (0, 0)
        self._sidecar = (0, 0)

    @classmethod
    def create(cls, *, rank: int, world_size: int, pid: int, started_ticks: int, ring_bytes: int = 1 << 20) -> Self:
        """Make a page; PageError says in one sentence why it cannot be made."""
        require_little_endian()
        identity = PageIdentity(
            rank=rank, world_size=world_size, pid=pid, started_ticks=started_ticks, ring_bytes=ring_bytes
        )
        if (flaw := find_flaw(identity)) is not None:
            raise PageError(f"the shared page cannot be made: {flaw}")
        try:
            fd, mapped = _map_new_file(identity.page_bytes)
        except OSError as error:
            raise PageError(
                f"the shared page of {identity.page_bytes} bytes cannot be made: {error.strerror}"
            ) from error
        page = Page(mapped, ring_bytes)
        page.read_position.publish(0)
        # The header comes last: with it the file becomes a page.
        header = encode_identity(identity)
        mapped[: len(header)] = header
        writer = cls(fd, page, ring_bytes)
        os.register_at_fork(after_in_child=functools.partial(_disarm, weakref.ref(writer)))
        return writer

    @property
    def dropped(self) -> int:
        """Number of beats and payloads that were not written. Two drops at the same instant may show as one until the next."""
        return self._dropped

    def beat(self, step: int, phase: int, micro_step: int, at_ns: int) -> None:
        """Say where the rank is in its step."""
        page = self._page
        if page is None:
            return
        if not self._beat_lock.acquire(False):
            self._count_drop(page)
            return
        try:
            page.heartbeat.put(HEARTBEAT.pack(step, phase, micro_step, at_ns))
        except struct.error:  # not an integer of 64 bits
            self._count_drop(page)
        finally:
            self._beat_lock.release()

    def write(self, payload: bytes) -> bool:
        """Append a payload to the ring; False if it was dropped, which is counted."""
        page = self._page
        if page is None:
            return False
        # Computed before taking the lock: crc32 lets other threads run while it reads a large payload.
        payload_crc = crc32(payload)
        if not self._ring_lock.acquire(False):
            self._count_drop(page)
            return False
        try:
            end = self._position + record_bytes(len(payload))
            if end > self._free_until and not self._find_room(page, end):
                self._count_drop(page)
                return False
            self._put(page, payload, payload_crc)
            # Our own position first: an interrupt between the two must not lead to overwriting a published record.
            self._position = end
            page.words[WRITE_POSITION] = end
            return True
        finally:
            self._ring_lock.release()

    def publish_rewind(self, step: int, blob: bytes) -> bool:
        """Publish how this step began, in place of the step before the previous one.

        False if it is too long or the page is gone. Only for the thread that trains.
        """
        page = self._page
        return page is not None and page.rewinds[step & 1].publish(REWIND_STEP.pack(step) + blob)

    def control(self) -> tuple[int, int]:
        """Return the (code, argument) that the sidecar set last; (0, 0) if it set none."""
        page = self._page
        if page is not None and (news := page.control.read_new()) is not None:
            self._control = (news[0], news[1])
        return self._control

    def take_notice(self) -> str | None:
        """Return a text that the sidecar posted since the last call, the latest of several; None if there is none."""
        page = self._page
        if page is None or (news := page.notice.read_new()) is None:
            return None
        text: bytes = news[0]
        return text.rstrip(b"\0").decode(errors="replace")

    def sidecar(self) -> tuple[int, int]:
        """Return pid and last beat (wall clock, ns) of the sidecar; (0, 0) until it is there."""
        page = self._page
        if page is not None and (news := page.sidecar.read_new()) is not None:
            self._sidecar = (news[0], news[1])
        return self._sidecar

    def close(self) -> None:
        """Let go of the page; the sidecar's mapping lives on. Afterwards every call does nothing."""
        self._page = None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _find_room(self, page: Page, end: int) -> bool:
        """Read how far the reader has come; True if a record may reach to `end`."""
        found = page.read_position.read()
        # A position that is torn or impossible frees nothing: the ring stays as full as it was.
        if found is not None and 0 <= self._position - found[0] <= self._ring_bytes:
            self._free_until = found[0] + self._ring_bytes
        if end <= self._free_until:
            return True
        # Perhaps the reader was misled by damage to our position in the page: write it again.
        page.words[WRITE_POSITION] = self._position
        return False

    def _put(self, page: Page, payload: bytes, payload_crc: int) -> None:
        length, ring, ring_bytes = len(payload), page.ring, self._ring_bytes
        header_at = self._position % ring_bytes
        start = (header_at + WORD_BYTES) % ring_bytes
        end = start + length
        if end <= ring_bytes:
            ring[start:end] = payload
        else:
            num_first = ring_bytes - start
            ring[start:] = payload[:num_first]
            ring[: length - num_first] = payload[num_first:]
        page.words[_RING_WORD + header_at // WORD_BYTES] = record_header(payload_crc, length, self._position)

    def _count_drop(self, page: Page) -> None:
        # next() is atomic, += is not. No lock, because a signal handler may have interrupted its holder.
        self._dropped = page.words[DROPPED] = next(self._drop_numbers)


def _disarm(writer: weakref.ref[PageWriter]) -> None:
    """Disarm the writer in a forked child: a data-loader worker is not a rank and must not write as one.

    The descriptor stays open, because the child may be about to become the sidecar.
    """
    if (found := writer()) is not None:
        found._page = None  # noqa: SLF001 - the same file


def _map_new_file(num_bytes: int) -> tuple[int, mmap.mmap]:
    fd, is_sealable = _new_file()
    try:
        os.ftruncate(fd, num_bytes)
        # Take the memory now. If a page of a sparse file cannot be had when it is first touched (/dev/shm or the disk
        # is full), that is a SIGBUS: it would kill the training process long after it was told that all is well.
        os.posix_fallocate(fd, 0, num_bytes)
        if is_sealable:
            # For the same reason nobody may shrink it under the rank.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, mmap.mmap(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise


def _new_file() -> tuple[int, bool]:
    """Return a nameless file that vanishes with its last user, and whether it can be sealed."""
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("holter-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), True
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # an old kernel, a sandbox
                raise
    # Use memory if possible: writing to a mapped file on disk waits while the kernel writes it back.
    directory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - the file has no name
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.dup(file.fileno()), False
