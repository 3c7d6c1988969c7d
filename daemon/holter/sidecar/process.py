"""The rank's process from outside: alive, and if not, how it ended.

An exit code belongs to the parent. We read it where the kernel shows it to others: from the zombie in /proc until the parent reaps
it, and from the pidfd afterwards (Linux 6.15 and newer).
"""

import fcntl
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

_INFO = struct.Struct("=QQ11Ii")  # struct pidfd_info, first version: mask, cgroup id, eleven ids, exit code
_INFO_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_STAT_STARTED = 19
_STAT_EXIT_CODE = 49
"""Fields of /proc/PID/stat counted from the one after the command's name."""


@dataclass(frozen=True)
class Ending:
    """How a process ended; both None: nobody could say."""

    exit_code: int | None
    signal: int | None

    @classmethod
    def from_status(cls, status: int) -> "Ending":
        """From a wait status."""
        signal = status & 0x7F
        return cls(None, signal) if signal else cls(status >> 8 & 0xFF, None)


class Process:
    """A process that is not our child, held by a file descriptor so that its number cannot be taken for another's."""

    def __init__(self, pid: int, started_ticks: int) -> None:
        self.pid = pid
        self.pidfd = _hold(pid, started_ticks)
        """-1: it ended before we came, and what it left on the page is all there is."""
        self._oom_events = _oom_file(pid)
        self._num_oom = _oom_count(self._oom_events)

    def ending(self) -> Ending | None:
        """How it ended, as far as the kernel tells now; None: alive, or not yet to be known."""
        status = self._status_of_zombie() if self.pidfd >= 0 else None
        if status is None:
            status = self._status_after_reaping()
        return None if status is None else Ending.from_status(status)

    def was_out_of_memory(self) -> bool:
        """Whether the kernel ended a process of the rank's group for memory since we began to watch."""
        return _oom_count(self._oom_events) > self._num_oom

    def _status_of_zombie(self) -> int | None:
        fields = _stat(self.pid)
        return int(fields[_STAT_EXIT_CODE]) if fields and fields[0] in "ZX" else None

    def _status_after_reaping(self) -> int | None:
        if self.pidfd < 0:
            return None
        buffer = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self.pidfd, _GET_INFO, buffer)
        except OSError:
            return None
        mask, *_, exit_code = _INFO.unpack(buffer)
        return exit_code if mask & _INFO_EXIT else None


def _hold(pid: int, started_ticks: int) -> int:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    if started_ticks and _started_ticks(pid) not in (started_ticks, None):
        # The number is another process's by now.
        os.close(descriptor)
        return -1
    return descriptor


def started_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where /proc does not say."""
    return _started_ticks(pid) or 0


def _started_ticks(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[_STAT_STARTED]) if fields else None


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name is in parentheses and may hold spaces and parentheses itself.
    return text[text.rindex(")") + 2 :].split()


def _oom_file(pid: int) -> Path | None:
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^0::(/.*)$", text, re.MULTILINE)
    return Path("/sys/fs/cgroup") / found[1].lstrip("/") / "memory.events" if found else None


def _oom_count(events: Path | None) -> int:
    try:
        text = events.read_text(encoding="utf-8") if events else ""
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
