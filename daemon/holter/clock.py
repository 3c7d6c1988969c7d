"""The only file that reads the clock; functions that judge take time as an argument.

The run's clock takes the wall-clock time at the process's start and runs steadily from then on. Setting a host's clock,
by hours and in either direction, therefore neither delays a verdict nor invents one. A restarted coordinator continues
with the clock of its predecessor.
"""

import datetime as dt
import time
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAME_NS = 50_000_000
"""Clocks that differ by less may be treated as the same; they are told apart if they fall on two sides of a multiple of
it."""


_base_ns = time.time_ns() - time.monotonic_ns()


def wall_ns() -> int:
    """Return nanoseconds since the epoch by the run's clock.

    Values from two hosts are comparable as far as the hosts' clocks agreed when the processes started.
    """
    return _base_ns + time.monotonic_ns()


def system_ns() -> int:
    """Return nanoseconds since the epoch by the host's current clock, to compare with stamps that others took from it."""
    return time.time_ns()


def for_people_s(at_s: float | None) -> float | None:
    """Convert a time of the run's clock to the host's current clock, for people who compare it with a clock of their own."""
    set_by_s = round((system_ns() - wall_ns()) / 1e9)
    return at_s + set_by_s if at_s is not None else None


def base_ns() -> int:
    """Return what another process on this host needs to use the same clock."""
    return _base_ns


def by_base_ns(base_ns: int) -> int:
    """Return the time by the clock of another process on this host."""
    return base_ns + time.monotonic_ns()


def go_on_from(base_ns: int) -> None:
    """Use the clock of another process on this host."""
    global _base_ns  # noqa: PLW0603 - there is one clock a process
    _base_ns = base_ns


def be_at_least(at_ns: int) -> None:
    """Move the clock forward to this time if it is behind, so that what was written down before is not in the future."""
    go_on_from(max(_base_ns, at_ns - time.monotonic_ns()))


monotonic_s = time.perf_counter
"""Seconds of a clock that never goes back, for measuring durations."""
thread_s = time.thread_time
"""Seconds of processor time of this thread, without its waiting and without other processes. A call takes about 1
us."""


def boot_id() -> str:
    """Return the id of this boot of the host's kernel; empty if not known."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def clock_id() -> str:
    """Return the id of this process's run clock; processes with the same id read the same time. Empty if not known.

    It consists of the boot and the base: if a host's clock was set between the starts of two processes, they have two
    clocks.
    """
    boot = boot_id()
    return boot and f"{boot}/{round(_base_ns / SAME_NS)}"


def rfc3339(at_ns: int) -> str:
    """Format a time as in the public JSON: `2026-11-15T10:15:00Z`."""
    return _utc(at_ns).strftime("%Y-%m-%dT%H:%M:%SZ")


def epoch_s(text: str) -> float:
    """Return the seconds since the epoch of a time that `rfc3339` wrote."""
    return dt.datetime.fromisoformat(text).timestamp()


def compact(at_ns: int) -> str:
    """Format a time as in run and incident ids: `20261115T101500`."""
    return _utc(at_ns).strftime("%Y%m%dT%H%M%S")


def _utc(at_ns: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(at_ns / 1e9, tz=dt.UTC)
