"""One live line at the bottom of the launching terminal, below the script's own output and never in it.

The last row is taken out of the scrolling region while the job runs, as apt does for its progress bar, and given back at the end.
The terminal is opened by its name, not inherited, and is never waited for.
"""

import fcntl
import os
import struct
import termios


class StatusLine:
    """Writes to a terminal device; every failure turns it off for good."""

    def __init__(self, device: str) -> None:
        self._fd = -1
        self._size = (0, 0)
        try:
            self._fd = os.open(device, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError:
            return
        if not os.isatty(self._fd):
            os.close(self._fd)
            self._fd = -1

    def show(self, text: str) -> None:
        """Replace the line."""
        size = self._terminal_size()
        if size is None:
            return
        rows, columns = size
        reserve = ""
        if size != self._size:
            # A line feed first: if the cursor stands on the last row, its text moves up instead of being covered.
            reserve = f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A"
            self._size = size
        self._write(f"{reserve}\x1b7\x1b[{rows};1H\x1b[7m{text[: columns - 1].ljust(columns - 1)}\x1b[0m\x1b8")

    def say(self, text: str) -> None:
        """Lines above the status line that stay."""
        self._write("\r\x1b[K" + text.replace("\n", "\r\n") + "\r\n")

    def close(self) -> None:
        """Give the row back."""
        if self._fd >= 0 and self._size[0]:
            rows, _ = self._size
            self._write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[r\x1b8")
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _terminal_size(self) -> tuple[int, int] | None:
        if self._fd < 0:
            return None
        try:
            rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(self._fd, termios.TIOCGWINSZ, bytes(8)))
        except OSError:
            return None
        return (rows, columns) if rows > 2 and columns > 20 else None  # noqa: PLR2004

    def _write(self, text: str) -> None:
        if self._fd < 0:
            return
        try:
            os.write(self._fd, text.encode("utf-8", "replace"))
        except BlockingIOError:
            # Somebody pressed Ctrl-S: the line can wait.
            return
        except OSError:
            os.close(self._fd)
            self._fd = -1
