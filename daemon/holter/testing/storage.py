"""Reads and writes that never come back: a file server that hangs, as a loader and as a save meet it."""

import io
import threading
from typing import TYPE_CHECKING, Any

from holter.testing.injection import Injection, replace

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def stall_loader(loader: "DataLoader[Any]", after: int = 0) -> Injection:
    """This loader gives `after` more batches and then none: who asks for one waits until the injection is undone.

    For a loader without workers: theirs is another process, which nobody could call back.
    """
    if loader.num_workers:
        raise ValueError(f"stall_loader needs a loader without workers, got one with {loader.num_workers}")
    call, is_over, made = loader.collate_fn, threading.Event(), 0

    def collate(samples: Any) -> Any:
        nonlocal made
        made += 1
        if made > after:
            is_over.wait()
        return call(samples)

    return replace(loader, "collate_fn", collate, is_over.set)


def stall_save(after: int = 0) -> Injection:
    """`torch.save` works `after` more times and then hangs while it writes, until the injection is undone."""
    import torch  # noqa: PLC0415  whoever rehearses has it; importing us must not

    call, is_over, made = torch.save, threading.Event(), 0

    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        made += 1
        if made > after and not is_over.is_set():
            call(
                obj, HangingStorage(is_over), *args, **kwargs
            )  # the write that hangs; when let go, it is done again for real
        call(obj, f, *args, **kwargs)

    return replace(torch, "save", save, is_over.set)


class HangingStorage(io.BytesIO):
    """Takes no byte and gives no error until it is told to."""

    def __init__(self, is_over: threading.Event) -> None:
        super().__init__()
        self._is_over = is_over

    def write(self, data: Any) -> int:
        """Waits, then writes."""
        self._is_over.wait()
        return super().write(data)
