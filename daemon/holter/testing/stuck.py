"""Ranks that are alive and get nowhere."""

import ctypes
import math
import threading

from holter import clock


def spin(seconds: float = math.inf) -> None:
    """Loop in Python, for ever or this long: the processor is busy, the interpreter answers."""
    end_s = clock.monotonic_s() + seconds
    while clock.monotonic_s() < end_s:
        pass


def sleep_for_ever() -> None:
    """Wait for something that nobody will say: no processor time, the interpreter answers."""
    threading.Event().wait()


def wait_for_lock() -> None:
    """Wait for a lock that this thread holds already: the shortest deadlock there is."""
    lock = threading.Lock()
    with lock:
        lock.acquire()


def hold_interpreter_lock(seconds: float, *, is_busy: bool = False) -> None:
    """Stay in native code that keeps the interpreter lock: no other thread of this process runs Python meanwhile.

    Asleep, as in a driver's call that does not come back; if busy, on a processor, as in one builtin over too much data: then the
    time is an estimate.
    """
    if not 0 <= seconds <= MOST_S:
        raise ValueError(f"seconds must be between 0 and {MOST_S}, got {seconds}")
    if is_busy:
        sum(range(int(seconds * _additions_a_second())))
    else:
        ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))


MOST_S = 1_000_000
"""Longer than any rehearsal, and poll's milliseconds still fit an int."""


def _additions_a_second() -> float:
    number = 200_000
    # The quickest: in the others the processor may have been somebody else's.
    return number / min(_seconds_of(number) for _ in range(3))


def _seconds_of(number: int) -> float:
    began_s = clock.monotonic_s()
    sum(range(number))
    return clock.monotonic_s() - began_s
