"""The rank's glance at its own sidecar, once a step: what it orders, what it wants said, and whether it is still there."""

import os
import select

from holter import clock
from holter.page import CONTROL_THIN, PageWriter

SILENT_S = 10.0
STARTUP_S = 30.0


class SidecarLink:
    """Reads what the sidecar left on the page; a few microseconds."""

    def __init__(self, page: PageWriter) -> None:
        self._page = page
        self._began = clock.monotonic_s()
        self._pid = 0
        self._poll: select.poll | None = None
        self._is_lost = False

    def thinning(self) -> int:
        """How many doublings less often the rank shall compare."""
        code, argument = self._page.control()
        return argument if code == CONTROL_THIN else 0

    def notice(self) -> str | None:
        """A sentence for the job's log."""
        return self._page.take_notice()

    def loss(self) -> str | None:
        """Why nobody watches any more; said once, until it is watched again."""
        why = self._why()
        is_new = why is not None and not self._is_lost
        self._is_lost = why is not None
        return why if is_new else None

    def _why(self) -> str | None:
        pid, seen_ns = self._page.sidecar()
        if not pid:
            is_late = clock.monotonic_s() - self._began > STARTUP_S
            return "its sidecar did not start" if is_late else None
        if pid != self._pid:
            self._hold(pid)
        if self._poll is None or self._poll.poll(0):
            return f"its sidecar (process {pid}) is gone"
        silent_s = (clock.wall_ns() - seen_ns) / 1e9
        return f"its sidecar (process {pid}) has been silent for {silent_s:.0f} s" if silent_s > SILENT_S else None

    def _hold(self, pid: int) -> None:
        """By a descriptor, so that the number cannot be taken for another process's."""
        self._pid, self._poll = pid, None
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
