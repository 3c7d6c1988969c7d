"""The halt agent's settings and parts, and how it ends the process: with exit code 93, whatever the interpreter and the libraries would return.

    main thread is held          SystemExit(93) -> the script's own `finally` and atexit -> our atexit, the last: os._exit(93)
                                 a script that does not end by itself is ended after a few seconds
    main thread is elsewhere     os._exit(93) from the halt agent's thread

Destructors of native libraries are skipped: some abort when peers are gone, and the exit code would be theirs.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from os import _exit
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, Protocol

from holter.halting import rank_protocol as table
from holter.halting.rank_protocol import Rank
from holter.rank.hold.commit_register import CommitRegister
from holter.rank.hooks.signals import Termination
from holter.records import EXIT_CODE, Order
from holter.threads import without_signals

HoldReason = Literal["nonfinite", "peer", "agreed"]
"""nonfinite: what the optimizer is about to apply is not finite on this rank; peer: on another rank's shard; agreed: the ranks stop before this step."""
SCRIPT_S = 10.0
"""Seconds that the script has to end by itself before it is ended."""
FLUSH_S = 1.0
ELASTIC = b"TORCHELASTIC_RESTART_COUNT="
"""A variable in the environment of processes that an elastic agent started, but not in the agent's own."""


class Position(NamedTuple):
    """Where the main thread is in the training."""

    step: int
    """Number of completed optimizer steps."""
    is_torn: bool
    """Whether it is inside an optimizer's step, or between two of one round, so that weights are partly new."""
    poisoned_step: int | None = None
    """The first step that was applied although it was not finite; None if there is none."""


class SaveActions(Protocol):
    """What the agent has others do, because it knows neither torch nor the framework."""

    def save(self, order: Order, *, is_main_thread: bool) -> None:
        """Write and verify this rank's part of the checkpoint; any exception says what was not saved."""

    def position(self) -> Position:
        """Return where the main thread is now."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What the agent is told once, when it is made."""

    rank: int
    world_size: int
    run_dir: str = ""
    """Empty if it is not known yet."""
    is_halting: bool = True
    """Whether the user's action is halt: then a non-finite step is held, and a process that is about to end asks first."""
    halt_signals: frozenset[int] = frozenset()
    """Numbers of the signals that ask for a halt at an agreed step."""
    neighbours: frozenset[int] = frozenset()
    """Ranks that the same launcher started."""


class Leaving:
    """Ends this process, once."""

    def __init__(self, announce: Callable[[], None], agent: int = 0) -> None:
        self.is_leaving = False
        self.before_end: Callable[[], None] = lambda: None
        """Called at exit; waits for work that the interpreter's end must not cut off."""
        self._announce = announce
        """Tells the sidecar that this end is intended."""
        self._agent = agent
        """Id of the process that would start this rank again; 0 if there is none."""
        self._pid = os.getpid()

    def register(self) -> None:
        """Register our exit function. This must come before all others, because the first one registered runs last."""
        atexit.register(self._at_exit)

    def leave(self, *, tells_agent: bool) -> NoReturn:
        """Leave the script as `sys.exit` would; to be called in the main thread."""
        self._begin(tells_agent=tells_agent)
        watchdog = threading.Timer(SCRIPT_S, self._end)
        watchdog.daemon = True
        with without_signals():
            watchdog.start()
        raise SystemExit(EXIT_CODE)

    def leave_now(self, *, tells_agent: bool) -> NoReturn:
        """End the process at once, from any thread, whatever the others do."""
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
        # Flush in another thread: the main thread may be blocked in the middle of a print and hold the lock.
        flush = threading.Thread(target=_flush, daemon=True)
        with contextlib.suppress(RuntimeError):
            with without_signals():
                flush.start()
            flush.join(FLUSH_S)
        _end_children()
        _exit(EXIT_CODE)


@dataclass(kw_only=True)
class AgentParts:
    """The parts with which the agent acts."""

    actions: SaveActions
    register: Callable[[], CommitRegister]
    """Makes the register when the first hold needs it. May raise any exception."""
    leaving: Leaving
    log: Callable[[str], None] = lambda _: None
    """Writes one sentence to the job's own log."""
    signals: Termination | None = None
    signal_fd: int = -1
    """File descriptor from which the numbers of signals are read; -1 if there is none."""
    patience_s: Callable[[Rank], float | None] = table.patience_s


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _end_children() -> None:
    """Terminate daemon children, as `multiprocessing` does at an ordinary end: loaders' workers would outlive us for seconds and hold our pipes."""
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()


def find_agent() -> int:
    """Return the id of the elastic agent that started this process, perhaps through a shell: the nearest ancestor that is no worker; 0 if none."""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            if not any(entry.startswith(ELASTIC) for entry in environ.split(b"\0")):
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return 0
