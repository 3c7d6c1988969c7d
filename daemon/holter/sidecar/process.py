"""Observes the rank's process from outside: what it does while it lives, and how it ended.

One look costs some tens of microseconds, because files of /proc are held open and read again.

Only the parent gets an exit code. We read it where the kernel shows it to others: from the zombie in /proc until the parent
reaps it, and from the pidfd afterwards (Linux 6.15 and newer).
"""

import fcntl
import math
import os
import re
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holter.records import ProcessState

_INFO = struct.Struct("=QQ11Ii")  # struct pidfd_info, first version: mask, cgroup id, eleven ids, exit code
_INFO_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_STAT_USER, _STAT_SYSTEM = 11, 12
_STAT_STARTED = 19
_STAT_EXIT_CODE = 49
"""Indices into the fields of /proc/PID/stat, counted from the one after the command's name."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SHARE_OVER_S = 0.9
"""Seconds over which the share of a processor is measured at least."""
_MAX_LOOKS = 16
State = Literal["running", "sleeping", "uninterruptible", "stopped", "traced", "frozen", "zombie", "gone", "unknown"]
_STATES: dict[str, State] = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "X": "gone",
}
CGROUPS = Path("/sys/fs/cgroup")
_BYTES = 4096


@dataclass(frozen=True)
class ProcessEnding:
    """How a process ended; both fields are None if that is unknown."""

    exit_code: int | None
    signal: int | None

    @classmethod
    def from_status(cls, status: int) -> "ProcessEnding":
        """Make it from a wait status."""
        signal = status & 0x7F
        return cls(None, signal) if signal else cls(status >> 8 & 0xFF, None)


class Process:
    """A process that is not our child, held by a file descriptor so that a reused pid is not mistaken for it."""

    def __init__(self, pid: int, started_ticks: int) -> None:
        self.pid = pid
        self.pidfd = _hold(pid, started_ticks)
        """-1 if it had ended before we came; then only its page can be read."""
        self._oom_events = _oom_file(pid)
        self._num_oom = _oom_count(self._oom_events)
        self._files = {name: CachedFile(f"/proc/{pid}/{name}") for name in ("stat", "wchan", "schedstat", "cgroup")}
        self._pressure = Pressure()
        self._cpu: deque[tuple[float, float]] = deque(maxlen=_MAX_LOOKS)
        self._still: tuple[str, str] | None = None
        """Identifies the present standstill of the main thread; None if it is not standing still."""
        self._still_since_s = 0.0

    def look(self, now_s: float) -> ProcessState:
        """Return what the main thread does now, and the processor time that all threads have used so far."""
        fields = _fields(self._files["stat"].read()) if self.pidfd >= 0 else None
        if fields is None:
            return ProcessState(state="gone", cpu_s=self._cpu[-1][1] if self._cpu else 0.0, cpu_share=math.nan)
        state = _STATES.get(fields[0], "unknown")
        if state in ("sleeping", "uninterruptible") and is_frozen(self._files["cgroup"].read()):
            state = "frozen"
        channel = self._files["wchan"].read().strip() if state in ("sleeping", "uninterruptible") else ""
        cpu_s = (int(fields[_STAT_USER]) + int(fields[_STAT_SYSTEM])) / _TICKS_PER_S
        return ProcessState(
            state=state,
            cpu_s=cpu_s,
            cpu_share=self._share(now_s, cpu_s),
            wait_channel="" if channel == "0" else channel,
            stopped_s=self._stopped_s(state, now_s),
            pressure=self._pressure.read(),
        )

    def _share(self, now_s: float, cpu_s: float) -> float:
        """Return the share of a processor since the newest look that is old enough; nan if there is none."""
        before = next(((at_s, then_s) for at_s, then_s in reversed(self._cpu) if now_s - at_s >= _SHARE_OVER_S), None)
        self._cpu.append((now_s, cpu_s))
        return (cpu_s - before[1]) / (now_s - before[0]) if before is not None else math.nan

    def _stopped_s(self, state: State, now_s: float) -> float:
        match state:
            case "stopped" | "traced" | "frozen":
                still = ("halted", "")
            case "uninterruptible":
                # A thread that reads a slow disk sleeps at every look; it is still the same sleep only if it has not run in between.
                still = ("asleep", self._files["schedstat"].read())
            case _:
                self._still = None
                return 0.0
        if still != self._still:
            self._still, self._still_since_s = still, now_s
        return now_s - self._still_since_s

    def ending(self) -> ProcessEnding | None:
        """Return how it ended, as far as the kernel shows now; None if it is alive or that is not known yet."""
        status = self._status_of_zombie() if self.pidfd >= 0 else None
        if status is None:
            status = self._status_after_reaping()
        return None if status is None else ProcessEnding.from_status(status)

    def was_out_of_memory(self) -> bool:
        """Whether the kernel killed a process of the rank's control group for lack of memory since this watch began."""
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
    if started_ticks and (fields := _stat(pid)) and int(fields[_STAT_STARTED]) != started_ticks:
        # The pid belongs to another process by now.
        os.close(descriptor)
        return -1
    return descriptor


def started_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if /proc does not say."""
    fields = _stat(pid)
    return int(fields[_STAT_STARTED]) if fields else 0


def _stat(pid: int) -> list[str] | None:
    try:
        return _fields(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def _fields(stat: str) -> list[str] | None:
    # The command's name is in parentheses and may hold spaces and parentheses itself.
    return stat[stat.rindex(")") + 2 :].split() if ")" in stat else None


def _oom_file(pid: int) -> Path | None:
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return None
    return next((path for path in cgroup_files(text, "memory.events") if path.exists()), None)


def _oom_count(events: Path | None) -> int:
    try:
        text = events.read_text(encoding="utf-8") if events else ""
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


class CachedFile:
    """A small file of the kernel that is held open and read from its beginning every time."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def read(self) -> str:
        """Return its present content; empty if it cannot be read, or its subject is gone."""
        if self._fd < 0:
            return ""
        try:
            return os.pread(self._fd, _BYTES, 0).decode("utf-8", "replace")
        except OSError:
            return ""

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class Pressure:
    """The host's pressure as the kernel measures it; empty on a kernel that does not."""

    def __init__(self) -> None:
        self._files = {name: CachedFile(f"/proc/pressure/{name}") for name in ("cpu", "memory", "io")}

    def read(self) -> dict[str, float]:
        """Return the share of the last ten seconds in which some task waited, 0 to 1, by resource."""
        found = {name: _some_avg10(file.read()) for name, file in self._files.items()}
        return {name: share for name, share in found.items() if share is not None}


def cgroup_files(membership: str, name: str, controller: str = "") -> Iterator[Path]:
    """Yield where a file of a process's control group may lie, from its /proc/PID/cgroup.

    Version 2 may be used alone or beside version 1.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "-", "")
        if controllers == controller == "":
            yield CGROUPS / path.lstrip("/") / name
            yield CGROUPS / "unified" / path.lstrip("/") / name
        elif controller and controller in controllers.split(","):
            yield CGROUPS / controller / path.lstrip("/") / name


def is_frozen(membership: str) -> bool:
    """Whether the process's control group is frozen, by itself or through one above it."""
    events = _first(cgroup_files(membership, "cgroup.events"))
    if "frozen 1" in events.splitlines():
        return True
    return _first(cgroup_files(membership, "freezer.state", "freezer")).strip() == "FROZEN"


def _first(paths: Iterator[Path]) -> str:
    """Return the text of the first file that exists; empty if none does."""
    for path in paths:
        try:
            return path.read_text(encoding="utf-8")
        except OSError:
            continue
    return ""


def _some_avg10(text: str) -> float | None:
    """Read the share from `some avg10=1.39 avg60=…`."""
    _, found, rest = text.partition("some avg10=")
    return float(rest.split(maxsplit=1)[0]) / 100 if found else None
