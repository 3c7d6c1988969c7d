"""What is written into the job's own log and its launcher's error file about a rank's end.

LastLine    one line on the rank's standard error after the rank has ended; holds the descriptor as long as the rank does, and
            some seconds longer
ErrorFile   TORCHELASTIC_ERROR_FILE, from which torchrun makes its summary of a failed job: the diagnosis is put before whatever
            the rank itself wrote there
"""

import contextlib
import json
import os
import select
from pathlib import Path
from typing import Any

from holter import clock
from holter.files import write_whole

MAX_BYTES = 4096
"""A pipe that is writable at all takes this many bytes at once."""


class LastLine:
    """The last line about a rank; only the first call writes it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, text: str) -> None:
        """Write the line if that is possible without waiting, then close the descriptor."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            line = f"holter: {text}\n".encode("utf-8", "replace")[:MAX_BYTES]
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            if any(event & select.POLLOUT for _, event in poll.poll(0)):
                os.write(self._descriptor, line)
        self.close()

    def close(self) -> None:
        """Close the descriptor, so that those who wait for the end of the rank's output need wait no longer."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ErrorFile:
    """One rank's error file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._said: list[str] = []

    def add(self, verdict: str) -> None:
        """Put this verdict before earlier ones and what the rank has written itself.

        Nobody reads the file of a rank that does not fail.
        """
        if self._path is None:
            return
        self._said.insert(0, f"holter: {verdict}")
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(self._content(self._path)).encode())

    def _content(self, path: Path) -> dict[str, Any]:
        written: Any = None
        with contextlib.suppress(OSError, ValueError):
            written = json.loads(path.read_bytes())
        message = written.get("message") if isinstance(written, dict) else None
        extra = message.get("extraInfo") if isinstance(message, dict) else None
        known = extra if isinstance(extra, dict) else {"timestamp": str(int(clock.wall_ns() / 1e9))}
        own = known.get(OWN, known.get("py_callstack", ""))
        shown = "\n".join([*self._said, *([str(own)] if own else [])])
        head = self._said[0].partition("\n")[0]
        return {"message": {"message": head, "extraInfo": {**known, OWN: own, "py_callstack": shown}}}


OWN = "before_holter"
"""Key under which the rank's own traceback is kept, as torch's `record` wrote it."""
