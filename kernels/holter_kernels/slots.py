"""The ring of result slots of a pass over device tensors.

    slot 0   rows on the device ──copy──▶ pinned rows ─▶ event      under way: the device still writes
    slot 1   …                                                      answered: copied out into its ticket, free for the next start
    …

A ticket is one start's claim to its slot. A slot is free again when the copy's event has passed: what nobody has polled until then is copied out into the ticket, so that an
answer is never lost and never another's.
"""

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

from holter_kernels import devices
from holter_kernels.layout import NUM_BINS, ROW, blank
from holter_kernels.pinned import PINNED, PinnedPiece

NUM_SLOTS = 8
"""Number of readings of one pass that may be under way: a device may lag that many steps behind."""
MAX_SLOT_BYTES = 8 << 20
"""Largest size of all slots of a pass together; histograms of thousands of tensors get fewer slots, but at least
two."""
ROW_BYTES = ROW.itemsize

_retired: list[tuple[Any, torch.device, Any]] = []
"""Memory of slots that were dropped while under way, with the events after which nothing writes to it."""


class Slot:
    """Memory for the results of one launch, on the device and on the host, with its events."""

    def __init__(
        self, device: torch.device, on_device: list[torch.Tensor], on_host: list[torch.Tensor], piece: PinnedPiece
    ) -> None:
        self.rows, self.bins, self.bases, self.flag = on_device
        self.host_rows, self.host_bins, self.host_bases = on_host
        self.rows_array = self.host_rows.numpy().view(ROW).reshape(-1)
        self.bins_array = self.host_bins.numpy().view(np.uint64)
        self.bases_array = self.host_bases.numpy()
        self._device, self._piece = device, piece
        self.began, self.ended = (devices.new_event(device, is_timing=True) for _ in range(2))
        self.copied = devices.new_event(device)
        self._is_under_way = False
        self._ticket: weakref.ref[Ticket] | None = None

    def __del__(self) -> None:
        """Keep the memory if the device may still write to it, until it no longer does."""
        if getattr(self, "_is_under_way", False) and _retired is not None:
            _retired.append((self.copied, self._device, (self._piece, self.rows, self.bins)))

    def is_answered(self) -> bool:
        """Whether the copy to the host is done, as far as is known without waiting."""
        return devices.is_past(self.copied, self._device)

    def is_free(self) -> bool:
        """Whether the device has finished with the slot; an answer that nobody has fetched is moved to its ticket."""
        if not self._is_under_way:
            return True
        if not self.is_answered():
            return False
        ticket = None if self._ticket is None else self._ticket()
        if ticket is not None:
            ticket.fetch()
        self._is_under_way = False
        return True

    def claim(self, **answer: Any) -> "Ticket":
        """Give the slot to a new ticket until `copied` has passed; call this once `copied` is recorded."""
        ticket = Ticket(self, **answer)
        self._ticket, self._is_under_way = weakref.ref(ticket), True
        return ticket


class Ticket:
    """The answer of one launch, fetched from its slot when it is there."""

    __slots__ = ("__weakref__", "_answer", "_bits_only", "_device_s", "_is_narrow", "_slot", "_statistics", "flag")

    def __init__(self, slot: Slot, *, statistics: bool, bits_only: list[int], is_narrow: bool = False) -> None:
        self._slot: Slot | None = slot
        self._statistics, self._bits_only, self._is_narrow = statistics, bits_only, is_narrow
        self._answer: tuple[np.ndarray, np.ndarray | None] | None = None
        self._device_s: float | None = None
        self.flag: torch.Tensor | None = slot.flag if statistics else None

    def fetch(self) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Return rows and histograms; None while they are under way. Never waits."""
        slot = self._slot
        if slot is not None and slot.is_answered():
            rows = widen(slot.rows_array.copy()) if self._is_narrow else slot.rows_array.copy()
            rows = finish(rows, statistics=self._statistics, bits_only=self._bits_only)
            self._answer = rows, slot.bins_array.copy() if len(slot.bins_array) else None
            self._device_s = _elapsed_s(slot)
            self._slot = None
        return self._answer

    def device_s(self) -> float | None:
        """Return the seconds that the device spent; None until the answer is fetched."""
        return self._device_s


def _elapsed_s(slot: Slot) -> float | None:
    try:
        return float(slot.began.elapsed_time(slot.ended)) / 1e3
    except Exception:  # noqa: BLE001 - a device whose events keep no time
        return None


def widen(rows: np.ndarray) -> np.ndarray:
    """Convert rows of a device without float64, whose float32 numbers lie in the low half of each field."""
    for name in ROW.names or ():
        if ROW[name].kind == "f":
            rows[name] = rows[name].copy().view(np.uint64).astype(np.uint32).view(np.float32)
    return rows


def finish(rows: np.ndarray, *, statistics: bool, bits_only: list[int]) -> np.ndarray:
    """Return rows as the kernels left them, with NaN for what has no value."""
    if not statistics:
        for name in ("min", "max", "absmax", "absmin_nonzero"):
            rows[name] = 0
        return rows
    nothing = rows["min"] > rows["max"]
    for name in ("min", "max", "absmax"):
        rows[name] = np.where(nothing, np.nan, rows[name] + 0.0)
    rows["absmin_nonzero"][np.isinf(rows["absmin_nonzero"])] = np.nan
    return blank(rows, bits_only)


class Ring:
    """The slots of a pass, all made at its first start: four tensors on the device and one piece of pinned memory."""

    def __init__(self, device: torch.device, num_rows: int, *, has_bins: bool) -> None:
        shapes = [(num_rows, ROW_BYTES // 8), (num_rows * has_bins, NUM_BINS), (num_rows,)]
        sizes = [math.prod(shape) for shape in shapes]
        count = max(2, min(NUM_SLOTS, MAX_SLOT_BYTES // max(1, 8 * sum(sizes))))
        piece = PINNED.take(8 * sum(sizes) * count)
        if piece is None:
            raise MemoryError("holter's pinned memory is full")
        host = piece.memory[: 8 * sum(sizes) * count].view(torch.int64)
        # Rows of 16 bytes and multiples of it: Triton compiles a kernel again for a pointer that is no multiple of 16.
        padded = [*shapes[:2], (num_rows + num_rows % 2,)]
        there = [torch.zeros((count, *shape), dtype=torch.int64, device=device) for shape in padded]
        flags = torch.zeros((count, 4), dtype=torch.float32, device=device)
        self._slots = deque[Slot]()
        for k, mine in enumerate(host.split(sum(sizes)) if sum(sizes) else [host] * count):
            parts = [part.view(shape) for part, shape in zip(mine.split(sizes), shapes, strict=True)]
            self._slots.append(
                Slot(
                    device,
                    [*(one[k, : shape[0]] for one, shape in zip(there, shapes, strict=True)), flags[k, 0]],
                    parts,
                    piece,
                )
            )

    def next(self) -> Slot | None:
        """Return the slot that was used longest ago; None while that one, and therefore all, are under way."""
        if _retired:
            _retired[:] = [one for one in _retired if not devices.is_past(one[0], one[1])]
        if not self._slots[0].is_free():
            return None
        self._slots.rotate(-1)
        return self._slots[-1]
