"""Faults for rehearsals: processes that stop or end, stuck ranks, skipped collectives, hanging storage, slow ranks.

Those that change something of the job return an `Injection`, which can be undone.
"""

import ctypes
import io
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

from holter import clock

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

MOST_S = 1_000_000
"""Longest duration in seconds: longer than any rehearsal, and its milliseconds still fit poll's int."""


def suspend(pid: int | None = None) -> None:
    """Stop a process as a debugger does (SIGSTOP); without a pid this one. It stays so until `resume`."""
    os.kill(_pid(pid), signal.SIGSTOP)


def resume(pid: int) -> None:
    """Let a suspended process go on (SIGCONT)."""
    os.kill(pid, signal.SIGCONT)


def kill(pid: int | None = None) -> None:
    """End a process without warning (SIGKILL), as the kernel does when memory is short; without a pid this one."""
    os.kill(_pid(pid), signal.SIGKILL)


def abort() -> NoReturn:
    """End this process as a failed assertion in native code does (SIGABRT)."""
    os.abort()


def leave(code: int = 1) -> NoReturn:
    """End this process with an exit code and no last words: nothing is flushed, no handler runs."""
    os._exit(code)


def _pid(pid: int | None) -> int:
    if pid is not None and pid <= 0:
        raise ValueError(f"pid must be that of one process, got {pid}")
    return os.getpid() if pid is None else pid


def spin(seconds: float = math.inf) -> None:
    """Loop in Python, without end or for so many seconds: the processor is busy, the interpreter answers."""
    end_s = clock.monotonic_s() + seconds
    while clock.monotonic_s() < end_s:
        pass


def sleep_for_ever() -> None:
    """Wait for an event that never comes: no processor time is used, the interpreter answers."""
    threading.Event().wait()


def wait_for_lock() -> None:
    """Wait for a lock that this thread already holds: the shortest deadlock there is."""
    lock = threading.Lock()
    with lock:
        lock.acquire()


def hold_interpreter_lock(seconds: float, *, is_busy: bool = False) -> None:
    """Stay in native code that keeps the interpreter lock: no other thread of this process runs Python meanwhile.

    Asleep, as in a driver's call that does not come back; if busy, on a processor, as in one builtin over too much data: then the
    time is an estimate.
    """
    if not 0 <= seconds <= MOST_S:
        raise ValueError(f"seconds must be between 0 and {MOST_S}, got {seconds}")
    if is_busy:
        sum(range(int(seconds * _additions_a_second())))
    else:
        ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))


def _additions_a_second() -> float:
    number = 200_000
    # Take the fastest: during the others the processor may have been used by somebody else.
    return number / min(_seconds_of(number) for _ in range(3))


def _seconds_of(number: int) -> float:
    began_s = clock.monotonic_s()
    sum(range(number))
    return clock.monotonic_s() - began_s


class Injection:
    """A change to the job; `undo`, or the end of a `with` block, takes it back."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def undo(self) -> None:
        """Take the change back, so that whatever it stalled goes on; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _replaced(owner: object, name: str, value: object, also: Callable[[], None] = lambda: None) -> Injection:
    """Set an attribute; undoing restores it, unless somebody else has replaced it since, and calls `also`."""
    before = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, before)
        also()

    return Injection(undo)


def skip_collective(operation: str = "all_reduce", after: int = 0, times: int = 1) -> Injection:
    """Skip calls of `torch.distributed.<operation>` in this process: `times` of them, after `after` more were made.

    The caller gets None, as from a call that is done. Collectives that DistributedDataParallel calls by itself come
    from native code and cannot be skipped: skip one of the script's own.
    """
    import torch.distributed as dist  # noqa: PLC0415  whoever rehearses has it; importing us must not

    if not hasattr(dist, operation):
        raise ValueError(f"torch.distributed has no operation {operation!r}")
    if after < 0 or times < 1:
        raise ValueError(f"after must not be negative and times must be positive, got {after} and {times}")
    call, calls = getattr(dist, operation), itertools.count(1)

    def skipping(*args: Any, **kwargs: Any) -> Any:
        return None if after < next(calls) <= after + times else call(*args, **kwargs)

    return _replaced(dist, operation, skipping)


def stall_loader(loader: "DataLoader[Any]", after: int = 0) -> Injection:
    """Let the loader yield `after` more batches and then hang, until the injection is undone.

    Only for a loader without workers: those are other processes, which nobody could call back.
    """
    if loader.num_workers:
        raise ValueError(f"stall_loader needs a loader without workers, got one with {loader.num_workers}")
    call, is_over, calls = loader.collate_fn, threading.Event(), itertools.count(1)

    def collate(samples: Any) -> Any:
        if next(calls) > after:
            is_over.wait()
        return call(samples)

    return _replaced(loader, "collate_fn", collate, is_over.set)


def stall_save(after: int = 0) -> Injection:
    """Let `torch.save` work `after` more times and then hang while it writes, until the injection is undone."""
    import torch  # noqa: PLC0415  whoever rehearses has it; importing us must not

    call, is_over, calls = torch.save, threading.Event(), itertools.count(1)

    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if next(calls) > after and not is_over.is_set():
            # This write hangs; once released, the save is done again for real.
            call(obj, _HangingStorage(is_over), *args, **kwargs)
        call(obj, f, *args, **kwargs)

    return _replaced(torch, "save", save, is_over.set)


class _HangingStorage(io.BytesIO):
    """A file whose writes hang, without an error, until the event is set."""

    def __init__(self, is_over: threading.Event) -> None:
        super().__init__()
        self._is_over = is_over

    def write(self, data: Any) -> int:
        """Wait for the event, then write."""
        self._is_over.wait()
        return super().write(data)


def slow_forward(module: "nn.Module", seconds: float) -> Injection:
    """Make every forward pass of this module take so many seconds longer."""
    return Injection(module.register_forward_pre_hook(lambda *_: _pause(seconds)).remove)


def slow_backward(module: "nn.Module", seconds: float) -> Injection:
    """Make every backward pass through this module take so many seconds longer; its output must be a tensor."""

    def when_called(_: object, __: object, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: _pause(seconds))

    return Injection(module.register_forward_hook(when_called).remove)


def slow_data(loader: "DataLoader[Any]", seconds: float) -> Injection:
    """Make every batch of this loader take so many seconds longer, from the next pass over it.

    In a loader with workers, the workers are slow.
    """
    return _replaced(loader, "collate_fn", _Pausing(loader.collate_fn, seconds))


def _pause(seconds: float) -> None:
    """Wait in this process without using the processor."""
    if seconds < 0:
        raise ValueError(f"seconds must not be negative, got {seconds}")
    threading.Event().wait(seconds)


class _Pausing:
    """Calls after a pause; it can be pickled if its callable can, for workers that are spawned."""

    def __init__(self, call: Any, seconds: float) -> None:
        self.call, self.seconds = call, seconds

    def __call__(self, *args: Any) -> Any:
        """Pause, then call."""
        _pause(self.seconds)
        return self.call(*args)
