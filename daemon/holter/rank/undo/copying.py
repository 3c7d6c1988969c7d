"""Copies of tensors into host memory, made beside the training: by a thread, or on a stream of their own.

    copy begins   forward … backward   settle      weights change
    thread        copies ──────────▶   joined                        the interpreter's lock is free meanwhile
    device        copies on a side stream into pinned memory ──▶     the training's stream waits for it, the host does not

The thread is no daemon: one that is caught in native code by the interpreter's end would abort the process.
The way of a device has never been run.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from holter import clock
from holter.threads import without_signals

Pair = tuple[torch.Tensor, torch.Tensor]


def room_for(source: torch.Tensor) -> torch.Tensor:
    """Host memory for a copy of this tensor, laid out like it."""
    return torch.empty_like(source, device="cpu", pin_memory=source.device.type == "cuda")


def fits(room: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy may go there."""
    return (room.shape, room.dtype, room.stride()) == (source.shape, source.dtype, source.stride()) and (
        room.is_pinned() or source.device.type != "cuda"
    )


def is_captured() -> bool:
    """Whether a graph is being captured, which would take our copies along."""
    return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


class Copying:
    """One set of copies under way; pairs are of a target and its source."""

    def __init__(self, still: Sequence[Pair], moving: Sequence[Pair]) -> None:
        self._moving = moving
        self._here = [pair for pair in still if pair[1].device.type == "cpu"]
        self._there = [pair for pair in still if pair[1].device.type != "cpu"]
        self._thread = threading.Thread(target=self._run, name="holter-snapshot", daemon=False)
        self._events: list[tuple[Any, Any]] = []
        self._error: Exception | None = None
        self._ended_s = 0.0

    def start(self) -> None:
        """Copy what moves at once and begin with the rest, which may not change before `settle`."""
        _copy(self._moving)
        for device in {source.device for _, source in (*self._moving, *self._there)} - {torch.device("cpu")}:
            side, training = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            side.wait_stream(training)
            with torch.cuda.stream(side):
                _copy([pair for pair in self._there if pair[1].device == device])
                self._events.append((device, side.record_event()))
        with without_signals():
            self._thread.start()

    def _run(self) -> None:
        try:
            _copy(self._here)
            self._ended_s = clock.monotonic_s()
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            self._error = error

    def settle(self) -> None:
        """The sources are about to change: wait for the thread, and have the device wait. Raises what the copying raised."""
        self._thread.join()
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        if self._error is not None:
            raise self._error
        self._here, self._moving = [], []

    def ended_s(self) -> float:
        """When it was over, by the monotonic clock; of a device, when that was seen."""
        return self._ended_s if not self._events else clock.monotonic_s()

    def is_done(self) -> bool:
        """Whether all of it is there."""
        if self._thread.is_alive() or self._error is not None or not all(event.query() for _, event in self._events):
            return False
        self._there = []
        return True


def _copy(pairs: Sequence[Pair]) -> None:
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs], non_blocking=True)
