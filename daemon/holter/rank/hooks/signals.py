"""Handles, in C, the signals that end the rank.

A rank that crashes in native code gives its sidecar a moment to look (`csrc/crash_notice.c`). Under yama's ptrace_scope 1 only a process that
the rank has named may read its stacks (`allow_stacks`).

A signal that asks the rank to end is passed on to the halt agent, which may save first (`csrc/termination.c`).
"""

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterable

_PR_SET_PTRACER = 0x59616D61


class CrashNotice:
    """A socket between the rank and its sidecar, used once."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._descriptor = -1

    @property
    def sidecar_fd(self) -> int:
        """The sidecar's end of the socket, which it inherits."""
        return self._theirs.fileno()

    def install(self) -> None:
        """Report crashes from now on; does nothing if the extension was not built."""
        self._theirs.close()
        try:
            import holter.rank._crash_notice as native  # noqa: PLC0415  missing where there was no compiler
        except ImportError:
            self._ours.close()
            return
        # Detached, so that it stays open as long as the process lives, even if this object is collected.
        self._descriptor = self._ours.detach()
        native.install(self._descriptor)

    def uninstall(self) -> None:
        """Restore the previous signal handlers and close the socket."""
        with contextlib.suppress(ImportError):
            import holter.rank._crash_notice as native  # noqa: PLC0415

            native.uninstall()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def allow_stacks(sidecar_pid: int) -> None:
    """Let the sidecar, and processes that it starts, read this process's stacks; a kernel without yama needs no permission."""
    if sidecar_pid <= 0 or os.uname().sysname != "Linux":
        return
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    prctl(_PR_SET_PTRACER, sidecar_pid, 0, 0, 0)


class Termination:
    """A pipe on which the numbers of signals arrive, and the way to die of one."""

    def __init__(self) -> None:
        self.descriptor = -1
        """File descriptor from which the numbers are read; -1 if no handler is installed, and signals act as they do without us."""

    def install(self, numbers: Iterable[int]) -> None:
        """Handle these signals from now on, as far as nobody else does, so that they do not end the process by themselves."""
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
        """Let the process live this many seconds more after a SIGTERM; 0 means without a limit."""
        import holter.rank._termination as native  # noqa: PLC0415  it is there: a signal has come

        native.grant(seconds)

    def die(self, number: int, /) -> None:
        """End the process by this signal, now."""
        import holter.rank._termination as native  # noqa: PLC0415

        # The halt agent's thread blocks all signals, and the other threads may have blocked this one, too.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        native.die(number)
