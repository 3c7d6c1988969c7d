"""A rank that crashes in native code gives its sidecar a moment to look; see `csrc/crash_notice.c`.

Also the permission to look: under yama's ptrace_scope 1 only a process that the rank names may read its stacks.
"""

import contextlib
import ctypes
import os
import socket

_PR_SET_PTRACER = 0x59616D61


class CrashNotice:
    """A socket between the rank and its sidecar, used once."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._descriptor = -1

    @property
    def sidecar_fd(self) -> int:
        """To be handed down to the sidecar."""
        return self._theirs.fileno()

    def install(self) -> None:
        """Tell crashes from now on; nothing where the extension was not built."""
        self._theirs.close()
        try:
            import holter.rank._crash_notice as native  # noqa: PLC0415  missing where there was no compiler
        except ImportError:
            self._ours.close()
            return
        # Detached: it stays open as long as the process lives, whoever forgets this object.
        self._descriptor = self._ours.detach()
        native.install(self._descriptor)

    def uninstall(self) -> None:
        """Crash as before."""
        with contextlib.suppress(ImportError):
            import holter.rank._crash_notice as native  # noqa: PLC0415

            native.uninstall()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def allow_stacks(sidecar_pid: int) -> None:
    """Let the sidecar, and what it starts, read this process's stacks; a kernel without yama asks for no permission."""
    if sidecar_pid <= 0 or os.uname().sysname != "Linux":
        return
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    prctl(_PR_SET_PTRACER, sidecar_pid, 0, 0, 0)
