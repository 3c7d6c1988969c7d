"""Reads a text of any size once from front to back in bounded memory: numbers, errors, settings that it prints, ranks that it names.

A small file is read line by line. A large one is searched for the few words that matter, which is done at memory speed, and
of the lines with numbers an even choice is parsed, a few hundred per megabyte; lines of evaluations, errors and warnings
are all parsed, up to a bound. So a log of gigabytes costs seconds per gigabyte, and rare lines are not lost among frequent
ones.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from holter.offline import lines, naming
from holter.offline.errors import ErrorReader
from holter.offline.found import Config, Found
from holter.offline.recorder import RowRecorder

SMALL = 12 * 2**20
"""Size in bytes up to which a file is read line by line."""
CHUNK = 2**20
MAX_LINE = 16_384
"""Number of bytes to which lines are cut; no line of numbers is as long."""
END_OF_TABLE = "-" * lines.MIN_RULE
"""A line that is added at the end of a file, to end a table that was copied without its last line."""
MAX_PARSED, MIN_PER_CHUNK, MAX_PER_CHUNK = 60_000, 40, 400
"""Number of lines with numbers that are parsed in a large file, and the least and greatest number in each megabyte of it."""
MAX_RARE = 20_000
"""Number of lines of evaluations that are parsed in a large file."""
_NUMBERS = re.compile(rb"loss|trl:|reward|grad[_ ]norm")
_RARE = re.compile(rb"(?:val|eval|valid|test|dev)(?:idation|uation)?[ _/]*(?:loss|ppl)|tel:")
_HELD_OUT = (b"val", b"test", b"dev", b"tel:")
"""A chunk without any of these has no line of evaluations."""
_STOPPED_AT = re.compile(r"(?:NaN|nan|inf) at (?:iteration|step)[= ](\d+)")
_SETTING = re.compile(
    r"^\s{2,}([a-z][\w.-]*) \.{3,} (.+)$|^\s*--?([a-z][\w-]*)[= ](\S+)$|^(?:\S*:)?\s{2,}([a-z][\w.]*): (\S.*)$"
)
_NAMESPACE = re.compile(r"(?:Namespace|Arguments|Args|Config|TrainingArguments)\(([^()]{10,20000})")
_ASSIGNED = re.compile(r"(\w+)=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^,\s)]+)")
_VERSION = re.compile(
    r"^(torch|transformers|accelerate|deepspeed|trl|lightning|pytorch-lightning|numpy|cuda|nccl)\s*(?:==|:| )\s*v?(\d[\w.+]*)\s*$",
    re.IGNORECASE,
)

Report = Callable[[int], None]
"""Called with the number of bytes that were read."""


class TextReader:
    """Reads one file of text."""

    def __init__(self, file: str, found: Found) -> None:
        self._file = file
        self._found = found
        self._recorder = RowRecorder(file)
        self._context = lines.LineContext()
        self._errors = ErrorReader(file)
        self._settings: dict[str, str] = {}
        self._setting_lines: dict[str, int] = {}
        self._num_rare = 0
        self._last_line = 0
        self._per_chunk = MAX_PER_CHUNK
        self._num_chosen = 0

    def read(self, stream: BinaryIO, size: int, report: Report) -> None:
        """Read the whole stream."""
        if size <= SMALL:
            self._read_lines(stream, report)
        else:
            self._per_chunk = max(MIN_PER_CHUNK, min(MAX_PER_CHUNK, MAX_PARSED * CHUNK // size))
            self._search(stream, report)
        self._finish()

    def read_text(self, text: str) -> None:
        """Read a text that is in memory already."""
        self._lines_of(text.encode("utf-8", "replace"), 1)
        self._finish()

    def _finish(self) -> None:
        if (row := lines.parse(END_OF_TABLE, self._context)) is not None:
            self._recorder.add(row, self._last_line, self._context)
        self._found.runs.extend(run for run in self._recorder.runs() if run.names())
        self._found.errors.extend(self._errors.finish(self._recorder.last_step, self._recorder.num_rows))
        if self._settings:
            self._found.configs.append(Config(self._file, self._settings, self._setting_lines))

    def _read_lines(self, stream: BinaryIO, report: Report) -> None:
        number, rest = 1, b""
        while chunk := stream.read(CHUNK):
            report(len(chunk))
            cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r"))
            if cut < 0:
                rest = (rest + chunk)[-4 * CHUNK :]
                continue
            number += self._lines_of(rest + chunk[: cut + 1], number)
            rest = chunk[cut + 1 :]
        if rest:
            self._lines_of(rest, number)

    def _lines_of(self, chunk: bytes, number: int) -> int:
        """Read every line of a chunk; return how many line ends there were."""
        begin = number
        for line in chunk.split(b"\n"):
            for part in line.split(b"\r") if b"\r" in line else (line,):
                if part:
                    self._line(part, number)
            number += 1
        return number - begin - 1

    def _line(self, raw: bytes, number: int) -> None:
        self._last_line = number
        text = lines.plain(raw[:MAX_LINE].decode("utf-8", "replace"))
        if self._errors.line(text, number, self._step(text), self._recorder.num_rows):
            if stopped := _STOPPED_AT.search(text):
                # The script now prints the loss terms of that step.
                self._context.bar_step, self._context.bar_used = int(stopped.group(1)), False
            return
        row = lines.parse(text, self._context)
        if row is not None and (row.step is not None or any(map(naming.is_measured, row.values))):
            self._recorder.add(row, number, self._context)
        elif "=" in text or "..." in text or ":" in text or "--" in text:
            self._setting(text, number)

    def _step(self, text: str) -> int:
        """Return the last step that the log has reached, by its rows or its progress bar."""
        lines.note_bar(text, self._context)
        return max(self._recorder.last_step, -1 if self._context.bar_step is None else self._context.bar_step)

    def _setting(self, text: str, number: int) -> None:
        """Keep settings that a script prints about itself: argparse's namespace, Megatron's list, versions."""
        found: list[tuple[str, str]] = []
        if match := _SETTING.match(text):
            name, value = (one for one in match.groups() if one is not None)
            found = [(name, value.strip())]
        elif match := _NAMESPACE.search(text):
            found = [(name, value.strip("'\"")) for name, value in _ASSIGNED.findall(match.group(1))]
        elif match := _VERSION.match(text):
            found = [(f"version.{match.group(1).lower()}", match.group(2))]
        for name, value in found[:500]:
            if len(self._settings) < 5000:  # noqa: PLR2004 - no script has so many
                self._settings[name] = value
                self._setting_lines[name] = number

    def _search(self, stream: BinaryIO, report: Report) -> None:
        number, rest = 1, b""
        while chunk := stream.read(CHUNK):
            report(len(chunk))
            whole = rest + chunk
            cut = max(whole.rfind(b"\n"), whole.rfind(b"\r"))
            if cut < 0:
                rest = whole[-CHUNK:]
                continue
            number += self._chosen(whole[: cut + 1], number)
            rest = whole[cut + 1 :]
        if rest:
            self._chosen(rest, number)

    def _chosen(self, chunk: bytes, number: int) -> int:
        """Read the lines of a chunk that matter; return how many line ends there were."""
        seen, at, line = -1, 0, number
        for place in self._places(chunk):
            if place <= seen:
                continue
            begin = max(chunk.rfind(b"\n", 0, place), chunk.rfind(b"\r", 0, place)) + 1
            end = _end(chunk, place)
            line += chunk.count(b"\n", at, begin)
            at, seen = begin, end
            self._num_chosen += 1
            self._line(chunk[begin:end], line)
        return line - number + chunk.count(b"\n", at)

    def _places(self, chunk: bytes) -> Iterable[int]:
        # A compressed file may hold far more than its size says.
        is_much = self._num_chosen > 2 * MAX_PARSED
        chosen = set(_even(chunk, MIN_PER_CHUNK if is_much else self._per_chunk))
        if self._num_rare < MAX_RARE and any(word in chunk for word in _HELD_OUT):
            rare = [match.start() for match in _RARE.finditer(chunk)]
            # Lines that are the majority are not rare.
            if 4 * len(rare) < chunk.count(b"\n"):
                self._num_rare += len(rare)
                chosen.update(rare)
        chosen.update(self._errors.places(chunk))
        return sorted(chosen)


def _even(chunk: bytes, num: int) -> Iterator[int]:
    """Yield the positions of lines of numbers from all over a chunk: the next one after each of evenly spaced positions."""
    for begin in range(0, len(chunk), max(1, len(chunk) // num)):
        if match := _NUMBERS.search(chunk, begin):
            yield match.start()


def _end(chunk: bytes, place: int) -> int:
    ends = [end for end in (chunk.find(b"\n", place), chunk.find(b"\r", place)) if end >= 0]
    return min(ends, default=len(chunk))
