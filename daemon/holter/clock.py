"""The only file that reads the clock; judges take time as an argument."""

import datetime as dt
import time
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def wall_ns() -> int:
    """Nanoseconds since the epoch: comparable between hosts as far as their clocks agree."""
    return time.time_ns()


def monotonic_s() -> float:
    """Seconds that never go back: for durations."""
    return time.perf_counter()


def thread_s() -> float:
    """Seconds that this thread has computed: what it waits for, and what others take of its core, is not in it. About 1 us a call."""
    return time.thread_time()


def boot_id() -> str:
    """Names the kernel whose clock this is: two processes with the same one read the same clock; empty: not known."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def rfc3339(at_ns: int) -> str:
    """`2026-11-15T10:15:00Z`, the form of the public JSON."""
    return _utc(at_ns).strftime("%Y-%m-%dT%H:%M:%SZ")


def epoch_s(text: str) -> float:
    """What `rfc3339` wrote, in seconds since the epoch."""
    return dt.datetime.fromisoformat(text).timestamp()


def compact(at_ns: int) -> str:
    """`20261115T101500`, the form of run and incident ids."""
    return _utc(at_ns).strftime("%Y%m%dT%H%M%S")


def _utc(at_ns: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(at_ns / 1e9, tz=dt.UTC)
