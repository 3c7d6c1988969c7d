"""A latch: one value, one publisher, any number of readers, no waiting, never half a value.

    sequence | check 0 | body 0 | check 1 | body 1

A sequence lock with two slots: value n goes to slot n & 1 and is there once the sequence says n. While n is being written, n - 1
stays whole in the other slot, so a publisher that is killed halfway still shows what it said before. The check is the body's
crc32 seeded with n: a body that was overwritten during the read, or whose stores arrived out of order (no barrier is to be had from
Python; x86 needs none), or whose bits flipped, does not match the sequence and is read again, a few times, then called torn.

`BlobLatch` holds a value of any length up to a limit; only what is used of it is written, checked and read.

    sequence | check 0 | length 0 | body 0 | check 1 | length 1 | body 1
"""

import struct
from typing import Any
from zlib import crc32

WORD_BYTES = 8
ATTEMPTS = 8
"""How often a reader looks again before it calls a value torn: a publisher needs a microsecond, a dead one is not waited for."""

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1


class Latch:
    """A place in the page where the latest of something is published."""

    __slots__ = ("_checks", "_form", "_seen", "_sequence", "_slots", "_words")

    def __init__(self, data: memoryview, words: memoryview, offset: int, form: struct.Struct) -> None:
        starts = (offset + WORD_BYTES, offset + 2 * WORD_BYTES + form.size)
        self._form = form
        self._words = words
        self._sequence = offset // WORD_BYTES
        self._checks = tuple(start // WORD_BYTES for start in starts)
        self._slots = tuple(data[start + WORD_BYTES : start + WORD_BYTES + form.size] for start in starts)
        self._seen = 0

    @property
    def is_written(self) -> bool:
        """Whether anything was ever published."""
        return self._words[self._sequence] != 0

    def publish(self, *values: int | bytes) -> None:
        """Replace the value. For one thread at a time; a restarted publisher goes on counting where the last one stopped."""
        body = self._form.pack(*values)
        sequence = (self._words[self._sequence] + 1) & _MASK_64
        side = sequence & 1
        self._slots[side][:] = body
        self._words[self._checks[side]] = crc32(body, sequence & _MASK_32)
        self._words[self._sequence] = sequence

    def read(self) -> tuple[Any, ...] | None:
        """The latest value; None: torn."""
        for _ in range(ATTEMPTS):
            sequence = self._words[self._sequence]
            side = sequence & 1
            body = self._slots[side].tobytes()
            if self._words[self._checks[side]] == crc32(body, sequence & _MASK_32):
                self._seen = sequence
                return self._form.unpack(body)
        return None

    def read_new(self) -> tuple[Any, ...] | None:
        """The latest value if it was not read before; None: nothing new, or torn and to be tried at the next call."""
        if self._words[self._sequence] == self._seen:
            return None
        return self.read()


class BlobLatch:
    """A latch for a value whose length varies, published by one thread."""

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
        """What a latch of this limit, a multiple of 8, takes of the page."""
        return WORD_BYTES + 2 * (2 * WORD_BYTES + limit)

    def publish(self, body: bytes) -> bool:
        """Replace the value; False: it is too long, and the one before stays."""
        length = len(body)
        if length > self._limit:
            return False
        sequence = (self._words[self._sequence] + 1) & _MASK_64
        side = sequence & 1
        self._bodies[side][:length] = body
        self._words[self._checks[side] + 1] = length
        self._words[self._checks[side]] = crc32(body, sequence & _MASK_32)
        self._words[self._sequence] = sequence
        return True

    def read(self) -> bytes | None:
        """The latest value, empty before the first; None: torn."""
        for _ in range(ATTEMPTS):
            sequence = self._words[self._sequence]
            if sequence == 0:
                return b""
            side = sequence & 1
            body = self._bodies[side][: min(self._words[self._checks[side] + 1], self._limit)].tobytes()
            if self._words[self._checks[side]] == crc32(body, sequence & _MASK_32):
                return body
        return None
