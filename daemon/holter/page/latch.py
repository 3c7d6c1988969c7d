"""A latch: one value, one publisher, any number of readers, no waiting, never half a value.

    sequence | check 0 | body 0 | check 1 | body 1

A sequence lock with two slots: value n goes to slot n & 1 and is there once the sequence says n. While n is being written, n - 1
stays whole in the other slot, so a publisher that is killed halfway still shows what it said before. The check is the body's
crc32 seeded with n: a body that was overwritten during the read, or whose stores arrived out of order (no barrier is to be had from
Python; x86 needs none), or whose bits flipped, does not match the sequence and is read again, a few times, then called torn.
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
