"""What the rank's halt agent is told and acts with, and how it ends the process: exit code 93, whatever the interpreter and the libraries would make of it.

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
"""What the optimizer is about to apply is not finite here; on another rank's shard; or the ranks agreed to stop before this step."""
SCRIPT_S = 10.0
"""For the script's own end."""
FLUSH_S = 1.0
ELASTIC = b"TORCHELASTIC_RESTART_COUNT="
"""In the environment of what an elastic agent started, and not in the agent's own."""


class Position(NamedTuple):
    """Where the main thread is."""

    step: int
    """Completed optimizer steps."""
    is_torn: bool
    """Inside an optimizer's step, or between two of one round: weights are partly new."""
    poisoned_step: int | None = None
    """The first that was applied although it was not finite."""


class SaveActions(Protocol):
    """What the agent cannot do itself: it knows no torch and no framework."""

    def save(self, order: Order, *, is_main_thread: bool) -> None:
        """Write and prove this rank's part; whatever it raises says what is not saved."""

    def position(self) -> Position:
        """Where the main thread is now."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What the agent is told once."""

    rank: int
    world_size: int
    run_dir: str = ""
    """Empty: not known yet."""
    is_halting: bool = True
    """The user's action is halt: what is not finite is held, and a process that is about to end asks first."""
    halt_signals: frozenset[int] = frozenset()
    """That ask for a halt at an agreed step."""
    neighbours: frozenset[int] = frozenset()
    """Ranks that the same launcher started."""


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


@dataclass(kw_only=True)
class AgentParts:
    """What the agent acts with."""

    actions: SaveActions
    register: Callable[[], CommitRegister]
    """Made when the first hold needs it. Raises anything."""
    leaving: Leaving
    log: Callable[[str], None] = lambda _: None
    """One sentence in the job's own log."""
    signals: Termination | None = None
    signal_fd: int = -1
    """Where the numbers of signals arrive."""
    patience_s: Callable[[Rank], float | None] = table.patience_s


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
