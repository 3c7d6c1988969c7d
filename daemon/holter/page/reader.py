"""The sidecar's side of the page: nothing in it is believed before it is checked.

A page that is not ours is refused when it is opened. After that, no content of the page can make a call raise or return
what was not written: what does not add up is counted in `torn`, and reading continues at the writer's position. For use
by one thread, and by one reader at a time; a reader that follows another continues where that one stopped.
"""

import mmap
import os
import stat
from typing import Self
from zlib import crc32

import msgspec

from holter.errors import PageError
from holter.page.layout import (
    ATTEMPTS,
    DROPPED,
    NOTICE_BYTES,
    REWIND_STEP,
    RING_OFFSET,
    WORD_BYTES,
    WRITE_POSITION,
    Page,
    PageIdentity,
    decode_identity,
    record_bytes,
    record_header,
    require_little_endian,
)
from holter.records import Phase

_RING_WORD = RING_OFFSET // WORD_BYTES
_LENGTH_MASK = (1 << 32) - 1
_PHASES = frozenset(Phase)


class PageHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The rank's last reported place in its step."""

    step: int
    phase: Phase
    micro_step: int
    at_ns: int
    """Wall clock of the rank, in nanoseconds since the epoch."""


class PageReader:
    """Reads what a rank wrote, whether it is alive or dead, and can leave messages for it."""

    def __init__(self, page: Page, identity: PageIdentity) -> None:
        self.identity = identity
        self.torn = 0
        """How often something in the page did not add up; each time may stand for several lost payloads."""
        self._page: Page | None = page
        found = page.read_position.read()
        if found is None:
            self.torn += 1
        self._position: int = page.words[WRITE_POSITION] if found is None else found[0]

    @classmethod
    def open(cls, source: int | str) -> Self:
        """Map a page, given by a path or by a descriptor, which the caller keeps.

        PageError says why it is not a page of ours, TornPageError why it is one but broken.
        """
        require_little_endian()
        try:
            if isinstance(source, int):
                mapped, identity = _map_page(source)
            else:
                fd = os.open(source, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
                try:
                    mapped, identity = _map_page(fd)
                finally:
                    os.close(fd)
        except OSError as error:
            raise PageError(f"{_name(source)} cannot be opened as a page: {error.strerror}") from error
        except PageError as error:
            raise type(error)(f"{_name(source)} is {error}") from None
        return cls(Page(mapped, identity.ring_bytes), identity)

    @property
    def dropped(self) -> int:
        """Number of beats and payloads that the rank could not write, by its own count."""
        return self._opened().words[DROPPED]

    def heartbeat(self) -> PageHeartbeat | None:
        """Return the rank's latest beat; None if it never beat, or if the beat is torn, which is counted."""
        latch = self._opened().heartbeat
        if not latch.is_written:
            return None
        values = latch.read()
        if values is None:
            self.torn += 1
            return None
        step, phase, micro_step, at_ns = values
        known = Phase(phase) if phase in _PHASES else Phase.OTHER
        return PageHeartbeat(step=step, phase=known, micro_step=micro_step, at_ns=at_ns)

    def read(self, limit: int = 1024) -> list[bytes]:
        """Return the next complete payloads in the order of writing, at most `limit`; each is returned only once."""
        page = self._opened()
        written = page.words[WRITE_POSITION]
        payloads: list[bytes] = []
        while len(payloads) < limit and self._position != written:
            payload = self._payload(page, written)
            if payload is None:
                self.torn += 1
                self._position = written
                break
            payloads.append(payload)
            self._position += record_bytes(len(payload))
        # Also if it did not move: if the published position was damaged, the writer waits for this to find room.
        page.read_position.publish(self._position)
        return payloads

    def rewinds(self) -> list[tuple[int, bytes]]:
        """Return how the rank's last two steps began, the older one first; fewer if something is missing or torn."""
        bodies = [latch.read() for latch in self._opened().rewinds]
        self.torn += bodies.count(None)
        whole = [body for body in bodies if body and len(body) >= REWIND_STEP.size]
        return sorted((*REWIND_STEP.unpack_from(body), body[REWIND_STEP.size :]) for body in whole)

    def set_control(self, code: int, argument: int) -> None:
        """Tell the rank something that it looks at in every step; both values are signed 64-bit integers."""
        self._opened().control.publish(code, argument)

    def post_notice(self, text: str) -> None:
        """Leave a text for the rank in place of the previous one; it is cut to what fits."""
        encoded = text.encode(errors="replace")[:NOTICE_BYTES]
        whole = encoded.decode(errors="ignore")
        self._opened().notice.publish(whole.encode())

    def beat(self, *, pid: int, at_ns: int) -> None:
        """Say that the sidecar is there."""
        self._opened().sidecar.publish(pid, at_ns)

    def close(self) -> None:
        """Let go of the page.

        Every other call raises PageError afterwards, because silence would look like a rank without news.
        """
        self._page = None

    def _opened(self) -> Page:
        if self._page is None:
            raise PageError(f"the page of rank {self.identity.rank} was closed by its reader")
        return self._page

    def _payload(self, page: Page, written: int) -> bytes | None:
        """Return the payload at the read position; None if it is torn."""
        num_unread = written - self._position
        if not 0 < num_unread <= self.identity.ring_bytes:
            return None
        header_at = self._position % self.identity.ring_bytes
        for _ in range(ATTEMPTS):
            header = page.words[_RING_WORD + header_at // WORD_BYTES]
            length = header & _LENGTH_MASK
            if record_bytes(length) <= num_unread:
                payload = self._copy(page, header_at + WORD_BYTES, length)
                if header == record_header(crc32(payload), length, self._position):
                    return payload
        return None

    def _copy(self, page: Page, start: int, length: int) -> bytes:
        start %= self.identity.ring_bytes
        first = page.ring[start : start + length].tobytes()
        return first + page.ring[: length - len(first)].tobytes()


def _name(source: int | str) -> str:
    return f"descriptor {source}" if isinstance(source, int) else source


def _map_page(fd: int) -> tuple[mmap.mmap, PageIdentity]:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise PageError("not a page: it is no regular file")
    identity = decode_identity(os.pread(fd, RING_OFFSET, 0), status.st_size)
    return mmap.mmap(fd, identity.page_bytes), identity
