"""Host memory for asynchronous copies to and from devices, in a few slabs for the whole process.

torch rounds every pinned allocation up to a power of two and keeps it for good. Passes need many small pieces, so they
are cut from slabs that are powers of two themselves; nothing is allocated once the passes of a step exist.
"""

import threading
import weakref

import torch

SLAB_BYTES = 1 << 20
LIMIT_BYTES = 64 << 20
"""Largest size of all slabs together: more than a model of 100,000 tensors needs for one reading in flight."""
_ALIGNMENT = 64


class _Slab:
    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        self.free = [(0, num_bytes)]

    def take(self, num_bytes: int) -> int | None:
        for k, (start, size) in enumerate(self.free):
            if size >= num_bytes:
                self.free[k : k + 1] = [(start + num_bytes, size - num_bytes)] if size > num_bytes else []
                return start
        return None

    def give_back(self, start: int, num_bytes: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, size in sorted([*self.free, (start, num_bytes)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = merged[-1][0], merged[-1][1] + size
            else:
                merged.append((begin, size))
        self.free = merged


class PinnedPiece:
    """Some pinned bytes, given back when nobody holds the piece any more.

    Code for which a device still writes to it must hold it.
    """

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class PinnedMemory:
    """The slabs, and their free space."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._slabs: list[_Slab] = []
        # A piece may be given back by any thread that drops the last reference, even in the middle of take().
        self._lock = threading.RLock()

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the system so far."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def take(self, num_bytes: int, *, is_pinned: bool = True) -> PinnedPiece | None:
        """Return a piece of at least this many bytes; None if that would exceed the limit."""
        num_bytes = max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        with self._lock:
            for slab in self._slabs:
                if slab.memory.is_pinned() == is_pinned and (start := slab.take(num_bytes)) is not None:
                    return self._piece(slab, start, num_bytes)
            size = max(SLAB_BYTES, 1 << (num_bytes - 1).bit_length())
            if self.num_bytes + size > self._limit_bytes:
                return None
            slab = _Slab(size, is_pinned=is_pinned)
            self._slabs.append(slab)
            start = slab.take(num_bytes)
            assert start is not None
            return self._piece(slab, start, num_bytes)

    def _piece(self, slab: _Slab, start: int, num_bytes: int) -> PinnedPiece:
        piece = PinnedPiece(slab.memory[start : start + num_bytes])
        weakref.finalize(piece, self._give_back, slab, start, num_bytes).atexit = False
        return piece

    def _give_back(self, slab: _Slab, start: int, num_bytes: int) -> None:
        with self._lock:
            slab.give_back(start, num_bytes)


PINNED = PinnedMemory()
