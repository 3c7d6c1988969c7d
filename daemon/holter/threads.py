"""holter's threads in the rank take no signals: these are for the script's own threads.

A script may block a signal in its threads and wait for it in one of them (`sigwait`). A thread of ours that had not blocked it would take
it, and the process would die of it.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

OWN = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
"""Raised by what a thread itself does; blocked, they would kill the process without calling its handlers."""


@contextmanager
def without_signals() -> Iterator[None]:
    """Threads started inside have all signals blocked but those of their own faults; what comes meanwhile waits."""
    # Asked for first: the call that blocks may raise what a Python handler raises, and has blocked by then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - OWN)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
