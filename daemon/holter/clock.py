"""The only file that reads the clock; judges take time as an argument.

The run's clock is the wall clock of the moment at which the process started, and steady from then on: whoever sets the clock of a host, by
hours and in either direction, neither delays a verdict nor makes one up. A coordinator that is started again goes on with the clock of the one before.
"""

import datetime as dt
import time
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAME_NS = 50_000_000
"""Clocks that differ by less may be taken for one; they are compared where they fall on two sides of a multiple of it."""


_base_ns = time.time_ns() - time.monotonic_ns()


def wall_ns() -> int:
    """Nanoseconds since the epoch by the run's clock: comparable between hosts as far as their clocks agreed when their processes started."""
    return by_base_ns(_base_ns)


def system_ns() -> int:
    """Nanoseconds since the epoch as the host says now: for what others stamped by its clock."""
    return time.time_ns()


def for_people_s(at_s: float | None) -> float | None:
    """A time of the run's clock, as the host's clock would now say it: for whoever compares it with a clock of their own."""
    set_by_s = round((system_ns() - wall_ns()) / 1e9)
    return at_s + set_by_s if at_s is not None else None


def base_ns() -> int:
    """What a process of the same host needs to go on with this clock."""
    return _base_ns


def by_base_ns(base_ns: int) -> int:
    """What time it is by the clock of another process of this host."""
    return base_ns + time.monotonic_ns()


def go_on_from(base_ns: int) -> None:
    """Use the clock of another process of this host."""
    global _base_ns  # noqa: PLW0603 - there is one clock a process
    _base_ns = base_ns


def be_at_least(at_ns: int) -> None:
    """Time has come this far already: what was written down before is not in the future."""
    go_on_from(max(_base_ns, at_ns - time.monotonic_ns()))


monotonic_s = time.perf_counter
"""Seconds that never go back: for durations."""
thread_s = time.thread_time
"""Seconds that this thread has computed: what it waits for, and what others take of its core, is not in it. About 1 us a call."""


def boot_id() -> str:
    """Names this host's kernel since it was started; empty: not known."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def clock_id() -> str:
    """Names the run's clock of this process: two processes with the same one read the same time; empty: not known.

    Beside the kernel's it is the base: a host whose clock was set between the starts of two processes has given them two.
    """
    boot = boot_id()
    return boot and f"{boot}/{round(_base_ns / SAME_NS)}"


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
