"""Output for terminals: tables, wrapped lines, and the progress of long work."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from holter import clock

T = TypeVar("T")
QUIET_S = 1.0
"""Seconds after which work shows its progress."""
MIN_WIDTH = 40
UNITS = ("bytes", "KB", "MB", "GB", "TB")
Progress = Callable[[int, int], None]
"""Called with the number of bytes done and the total number of bytes."""


def size_text(num_bytes: float) -> str:
    """Format a size in decimal units: `3.2 GB`."""
    for unit in UNITS[:-1]:
        if num_bytes < 1000:  # noqa: PLR2004 - the units'
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} {UNITS[-1]}"


class Meter:
    """Shows the progress of long work on standard error."""

    PATIENCE_S, INTERVAL_S = 2.0, 0.5

    def __init__(self) -> None:
        self._said_s = clock.monotonic_s() + self.PATIENCE_S
        self._is_shown = False

    def of(self, what: str) -> Progress:
        """Return a function that work calls with the bytes done and the total."""
        return lambda done, total: self._show(f"{what} {bar(done, total)} {size_text(done)} of {size_text(total)}")

    def per_file(self, total: int) -> Callable[[str, int], None]:
        """Return a function that work calls with each file's name and size before reading it."""
        done = 0

        def on_file(_name: str, num_bytes: int) -> None:
            nonlocal done
            self._show(f"tensors: {size_text(done)} of {size_text(total)}")
            done += num_bytes

        return on_file

    def end(self) -> None:
        """Remove the progress line."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")

    def _show(self, text: str) -> None:
        now_s = clock.monotonic_s()
        if sys.stderr.isatty() and now_s >= self._said_s + self.INTERVAL_S * self._is_shown:
            self._said_s, self._is_shown = now_s, True
            sys.stderr.write(f"\r\x1b[Kholter: {text}")
            sys.stderr.flush()


def bar(done: int, total: int, cells: int = 24) -> str:
    """`[######..................]  25 %`"""  # noqa: D400 - it is a picture
    share = min(1.0, done / total) if total else 1.0
    full = int(share * cells)
    return f"[{'#' * full}{'.' * (cells - full)}] {share:4.0%}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table whose columns are as wide as their widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def width(most: int = 100) -> int:
    """Return the terminal's width, at most `most`, beyond which text is hard to read; `most` if the output goes elsewhere."""
    return max(MIN_WIDTH, min(shutil.get_terminal_size((most, 24)).columns, most)) if sys.stdout.isatty() else most


def fitted(lines: Iterable[str]) -> Iterator[str]:
    """Cut lines of a table so that they do not wrap in a terminal; unchanged if the output goes elsewhere."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in lines:
        yield line if not columns or len(line) <= columns else line[: columns - 1] + "…"


def folded(lines: Iterable[str]) -> Iterator[str]:
    """Wrap long sentences at words, with an indent, in a terminal; unchanged if the output goes elsewhere."""
    columns = max(MIN_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 0
    for line in lines:
        is_long = 0 < columns < len(line)
        yield from textwrap.wrap(line, columns, subsequent_indent=" " * 4) if is_long else (line,)


def printable(text: str) -> str:
    """Replace control characters, because names come from the training script and must not move the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def with_progress(entries: Iterator[T]) -> Iterator[T]:
    """Yield the same items, showing progress on standard error if it takes long."""
    began_s = told_s = clock.monotonic_s()
    number = 0
    for number, entry in enumerate(entries, start=1):
        yield entry
        now_s = clock.monotonic_s()
        if now_s - told_s >= QUIET_S:
            told_s = now_s
            sys.stderr.write(f"\rholter: {number} entries ...")
            sys.stderr.flush()
    if told_s > began_s:
        sys.stderr.write(f"\rholter: {number} entries in {clock.monotonic_s() - began_s:.0f} s      \n")
