"""holter's threads in the rank block signals: those are for the script's own threads.

A script may block a signal in its threads and wait for it in one of them (`sigwait`). A thread of holter's that had not
blocked it would receive it, and the process would die of it.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

OWN = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
"""Signals raised by what a thread itself does; if blocked, they would kill the process without calling its handlers."""


@contextmanager
def without_signals() -> Iterator[None]:
    """Start threads inside this block with all signals blocked except those of their own faults; signals that arrive meanwhile wait."""
    # Asked first: the call that blocks may raise what a Python handler raises, and has blocked by then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - OWN)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
