"""The only place where the coordinator writes: a thread, so that a slow or dead disk never stops the judging.

A failed write is counted and logged once. It is no error for the caller, but the status shows it.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 0.05
WRITTEN_S = 2.0
"""Seconds to wait for a write that another coordinator may have to continue from."""
MAX_WAITING = 4096
"""Largest number of waiting writes; more are dropped and counted, because the disk hangs."""


class DirectoryLock:
    """Ensures that only one coordinator writes to a run directory; the lock ends with the process, so none is ever stale."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._descriptor = -1

    def take(self) -> bool:
        """Take the lock; False if another coordinator has it.

        If the directory or its file system cannot be locked, nobody is kept out.
        """
        with contextlib.suppress(OSError):
            self._descriptor = os.open(self._run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                return False
        return True

    def release(self) -> None:
        """Let the next coordinator write."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Disk:
    """Runs writes one after another, in a daemon thread, so that a hanging disk does not keep the process alive."""

    def __init__(self) -> None:
        self.may_write: Callable[[], bool | None] = lambda: True
        """Returns whether this coordinator may still write; None if nobody knows at the moment, so that writes go on
        waiting."""
        self.failures = 0
        self.last_failure = ""
        self._pause = threading.Event()
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="disk", daemon=True)
        self._thread.start()

    def submit(self, write: Callable[[], None]) -> bool:
        """Queue a write and return at once; False if there is no room."""
        try:
            self._waiting.put_nowait(write)
        except queue.Full:
            self._failed("the disk does not answer")
            return False
        return True

    async def written(self) -> None:
        """Wait until everything submitted so far is written, but not long for a disk that hangs."""
        loop, written = asyncio.get_running_loop(), asyncio.Event()
        self.submit(partial(_call, loop, written.set))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITTEN_S):
                await written.wait()

    def close(self, deadline_s: float) -> bool:
        """Finish the waiting writes; False if the deadline came first."""
        try:
            self._waiting.put(None, timeout=deadline_s)
        except queue.Full:
            return False
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (write := self._waiting.get()) is not None:
            while (may := self.may_write()) is None:
                self._pause.wait(ASK_AGAIN_S)
            if not may:
                continue  # Another coordinator writes there now.
            try:
                write()
            except Exception as error:  # noqa: BLE001 - counted and shown, see above
                self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, reason: str) -> None:
        if self.failures == 0:
            logger.warning("cannot write to the run directory, incidents are kept in memory only: %s", reason)
        self.failures += 1
        self.last_failure = reason


def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what)
