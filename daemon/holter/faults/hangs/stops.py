"""A stop from outside: SIGTERM to all ranks, which end one after the other, some of them only after they have saved.

    rank 0   SIGTERM ---- saves in its own handler ---- exit code 0
    rank 1   SIGTERM, dead                                                one stop, no death

One rank alone that is told to end looks the same at first. It is a death if its peers go on, fail over it, or live on for long.
"""

import signal

from holter.faults.hangs.endings import VICTIMS, kind_of, signal_of
from holter.faults.window import RankExit, Window


def is_stop(window: Window, abnormal: list[RankExit], *, stop_s: float, settle_s: float) -> bool:
    """Whether all ranks that ended were told to; those that live have so much time to follow."""
    first = abnormal[0]
    if not any(kind_of(end) == "terminated" for end in abnormal):
        return False
    if not all(_was_told(window, end, first, settle_s) for end in abnormal):
        return False
    if _goes_on(window, first, settle_s) or any(
        not _is_told_before(window, rank, first) for rank in window.processes.failing
    ):
        return False
    is_everyone_gone = window.attached <= {end.rank for end in window.processes.exits}
    return is_everyone_gone or (window.real_ns or window.now_ns) - first.at_ns < stop_s * 1e9


def _was_told(window: Window, end: RankExit, first: RankExit, settle_s: float) -> bool:
    """By SIGTERM; whoever was told and then lost its peers was told first. Who does not obey is killed in the end."""
    if kind_of(end) == "terminated":
        return True
    if kind_of(end) in VICTIMS:
        return _is_told_before(window, end.rank, first)
    is_cleared = signal_of(end) == signal.SIGKILL and not end.exited.out_of_memory
    return is_cleared and end.at_ns - first.at_ns > settle_s * 1e9


def _is_told_before(window: Window, rank: int, first: RankExit) -> bool:
    return rank in window.processes.signalled and window.processes.signalled[rank] <= first.at_ns


def _goes_on(window: Window, first: RankExit, settle_s: float) -> bool:
    """A step was begun and ended without it."""
    return any(view.first_seen_ns > first.at_ns + settle_s * 1e9 for view in window.steps)
