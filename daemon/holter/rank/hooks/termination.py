"""Signals that ask the rank to end, told to whoever may want to save first; see `csrc/termination.c`."""

import contextlib
import os
import signal
from collections.abc import Iterable


class Termination:
    """A pipe on which the numbers of signals arrive, and the way to die of one."""

    def __init__(self) -> None:
        self.descriptor = -1
        """Where they arrive; -1: nowhere, and every signal does what it does without us."""

    def install(self, numbers: Iterable[int]) -> None:
        """From now on these do not end the process by themselves, where nobody handles them."""
        try:
            import holter.rank._termination as native  # noqa: PLC0415  missing where there was no compiler
        except ImportError:
            return
        arrive, leave = os.pipe()
        os.set_blocking(leave, False)
        is_any = False
        for number in numbers:
            with contextlib.suppress(OSError):
                is_any |= native.install(leave, number)
        if is_any:
            self.descriptor = arrive
        else:
            os.close(arrive)
            os.close(leave)

    def grant(self, seconds: float, /) -> None:
        """Live so long after a SIGTERM; 0: as long as it takes."""
        import holter.rank._termination as native  # noqa: PLC0415  it is there: a signal has come

        native.grant(seconds)

    def die(self, number: int, /) -> None:
        """Of this signal, now."""
        import holter.rank._termination as native  # noqa: PLC0415

        # The desk's thread takes no signals, and the others may have blocked this one since.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        native.die(number)
