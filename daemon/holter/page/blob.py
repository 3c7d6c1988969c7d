"""A latch for a value of any length up to a limit; only what is used of it is written, checked and read.

    sequence | check 0 | length 0 | body 0 | check 1 | length 1 | body 1

As `latch`: value n goes to slot n & 1 and is there once the sequence says n; a publisher that is killed halfway still shows n - 1.
"""

from zlib import crc32

from holter.page.latch import ATTEMPTS, WORD_BYTES

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1


class BlobLatch:
    """A place in the page where the latest of something is published, by one thread."""

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
