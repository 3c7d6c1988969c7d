"""A rank that crashes says so on its socket, and waits a second and a half for our answer before it dies.

The other half is `rank/csrc/crash_notice.c`. Whoever is called back looks at the rank while all its other threads still
run, and then acknowledges, so that the rank does not wait longer than it must.
"""

import asyncio
import contextlib
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

_WORD = struct.Struct("=ii")


@dataclass(frozen=True)
class CrashingRank:
    """What a crashing thread reports."""

    signal: int
    thread: int
    """Its number in the kernel."""


class CrashListener:
    """The sidecar's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._received = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, loop: asyncio.AbstractEventLoop, on_crash: Callable[[CrashingRank], None]) -> None:
        """Call back for each crash, until the rank is gone."""
        os.set_blocking(self._descriptor, False)
        self._loop = loop
        loop.add_reader(self._descriptor, self._readable, on_crash)

    def acknowledge(self) -> None:
        """The rank may go."""
        # A rank that is gone, or has waited long enough, needs no answer.
        with contextlib.suppress(OSError):
            os.write(self._descriptor, b"!")

    def close(self) -> None:
        """Hang up: a crash from now on waits for nobody."""
        if self._descriptor < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1

    def _readable(self, on_crash: Callable[[CrashingRank], None]) -> None:
        try:
            chunk = os.read(self._descriptor, 4096)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        self._received += chunk
        while len(self._received) >= _WORD.size:
            number, thread = _WORD.unpack_from(self._received)
            del self._received[: _WORD.size]
            on_crash(CrashingRank(number, thread))
