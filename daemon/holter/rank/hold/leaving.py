"""The end of a rank that was halted: exit code 93, whatever the interpreter and the libraries would make of it.

    main thread stands in hold   SystemExit(93) -> the script's own `finally` and atexit -> ours, the last: os._exit(93)
                                 a script that does not end by itself is ended after a few seconds
    main thread is elsewhere     os._exit(93) from the halt agent's thread

Destructors of native libraries are not reached: some abort when peers are gone, and the code would be theirs.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from os import _exit
from pathlib import Path
from typing import NoReturn

from holter.records import EXIT_CODE
from holter.threads import without_signals

SCRIPT_S = 10.0
"""For the script's own end."""
FLUSH_S = 1.0
ELASTIC = b"TORCHELASTIC_RESTART_COUNT="
"""In the environment of what an elastic agent started, and not in the agent's own."""


class Leaving:
    """Ends this process, once."""

    def __init__(self, announce: Callable[[], None], agent: int = 0) -> None:
        self.is_leaving = False
        self.before_end: Callable[[], None] = lambda: None
        """Waits for what the interpreter's end must not cut off."""
        self._announce = announce
        """Tells the sidecar that this end is meant."""
        self._agent = agent
        """Process that would start this rank again; 0: there is none."""
        self._pid = os.getpid()

    def register(self) -> None:
        """Must be called before others register exit functions: the first registered runs last."""
        atexit.register(self._at_exit)

    def leave(self, *, tells_agent: bool) -> NoReturn:
        """In the main thread: leave the script as `sys.exit` would."""
        self._begin(tells_agent=tells_agent)
        watchdog = threading.Timer(SCRIPT_S, self._end)
        watchdog.daemon = True
        with without_signals():
            watchdog.start()
        raise SystemExit(EXIT_CODE)

    def leave_now(self, *, tells_agent: bool) -> NoReturn:
        """From any thread, whatever the others do."""
        self._begin(tells_agent=tells_agent)
        self._end()

    def _begin(self, *, tells_agent: bool) -> None:
        is_first, self.is_leaving = not self.is_leaving, True
        if not is_first:
            return
        with contextlib.suppress(Exception):
            self._announce()
        if tells_agent and self._agent:
            with contextlib.suppress(OSError):
                os.kill(self._agent, signal.SIGTERM)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self.before_end()
        if self.is_leaving:
            _flush()
            _end_children()
            _exit(EXIT_CODE)

    def _end(self) -> NoReturn:
        # The main thread may be blocked in the middle of a print.
        flush = threading.Thread(target=_flush, daemon=True)
        with contextlib.suppress(RuntimeError):
            with without_signals():
                flush.start()
            flush.join(FLUSH_S)
        _end_children()
        _exit(EXIT_CODE)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _end_children() -> None:
    """What `multiprocessing` does at an ordinary end: loaders' workers would outlive us for seconds and hold our pipes."""
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()


def find_agent() -> int:
    """The elastic agent that started this process, perhaps through a shell: the nearest forebear that is not a worker; 0: none."""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            if not any(entry.startswith(ELASTIC) for entry in environ.split(b"\0")):
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return 0
