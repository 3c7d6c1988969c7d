"""Reads files and folders: each file is what its content says, whatever its name is."""

import codecs
import gzip
import io
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from holter.errors import UsageError
from holter.offline import by_name, configs, dumps, events, naming, tables
from holter.offline import code as codes
from holter.offline.found import Code, Config, Found, LoggedRun, Shapes, WrittenSample
from holter.offline.text import TextReader

HEAD = 65_536
MAX_WHOLE = 12 * 2**20
"""Largest JSON document, in bytes, that is read at once; from a larger one, objects that hold only numbers and texts are
read one by one."""
MAX_HEADER = 32 * 2**20
"""Largest header of a file of weights, in bytes, that is read."""
MAX_INFLATED = 4 * 2**30
"""Number of bytes that are read of a compressed file, after decompression."""
MAX_ROW = 2**20
"""Number of bytes that are read at once; lines are cut to about this length."""
MAX_SENTENCE = 8192
"""Number of characters of a model's output that are looked at."""
LARGE = 12 * 2**20
PER_CHUNK = 400
"""Number of rows that are read per megabyte of a table larger than `LARGE`."""
MAX_FILES = 20_000
SKIPPED = frozenset({".git", "__pycache__", ".venv", "node_modules", ".ipynb_checkpoints"})
_BINARY = {b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture", b"PK\x03\x04": "an archive or a checkpoint", b"SQLite format 3": "a database", b"%PDF": "a PDF",
           b"\x7fELF": "a program", b"\x93NUMPY": "an array", b"BZh": "compressed by bzip2", b"\xfd7zXZ": "compressed by xz"}  # fmt: skip

_JSON = re.compile(r"""\{|\[\s*(?:[\[{"\]]|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?\s*[,\]]|NaN|null|true|false)""")
"""Matches the beginning of JSON; `[rank0]: ...` and `[2026-05-18 16:04:46] ...` are lines of a log."""

_ASKED = re.compile(
    r"^\W*(?:prompt|input|question|user|instruction|query|q|human|context)\b\s*\d*\s*[:>\]=-]", re.IGNORECASE
)
"""Matches a prompt, which samples of a model often print beside its answers."""

Progress = Callable[[int, int], None]
"""Called with the number of bytes that were read, and of all bytes."""


def read(paths: Sequence[Path], progress: Progress = lambda _done, _total: None) -> Found:
    """Read these files and folders; raise UsageError if nothing in them can be used."""
    found = Found()
    files = list(_files(paths, found))
    sizes = {path: _size(path) for path in files}
    total = sum(sizes.values())
    flights: list[Path] = []
    for path in files:
        meter = _Meter(progress, found.num_bytes, sizes[path], total)
        found.num_bytes += sizes[path]
        try:
            _read_file(path, sizes[path], found, flights, meter.read)
        except OSError as error:
            found.failures.append(f"{path} cannot be read: {error.strerror or error}")
        except (ValueError, RecursionError, struct.error, EOFError, OverflowError, MemoryError, zlib.error) as error:
            found.failures.append(f"{path} cannot be used: {type(error).__name__}: {str(error)[:120]}")
    by_name.note_ranks(found, files)
    if flights:
        _read_dumps(flights, found)
    found.runs = by_name.joined(_joined(found.runs))
    found.files = files
    if found.is_empty:
        raise UsageError(_nothing(paths, found))
    return found


class _Bounded(io.RawIOBase):
    """A compressed stream that ends at a bound, because some files decompress to enormous sizes."""

    def __init__(self, inner: gzip.GzipFile) -> None:
        super().__init__()
        self._inner = inner

    def read(self, size: int = -1) -> bytes:
        left = MAX_INFLATED - self._inner.tell()
        return self._inner.read(min(size, left) if size >= 0 else min(left, 4 * codes.MAX_BYTES)) if left > 0 else b""

    def readline(self, size: int | None = -1) -> bytes:
        return self._inner.readline(size or -1) if self._inner.tell() < MAX_INFLATED else b""

    def seek(self, place: int, whence: int = 0) -> int:
        return self._inner.seek(place, whence)

    def tell(self) -> int:
        return self._inner.tell()


class _Recoded(io.RawIOBase):
    """A text in UTF-16, as PowerShell writes it, that is read as UTF-8."""

    def __init__(self, inner: BinaryIO, encoding: str) -> None:
        super().__init__()
        self._inner, self._encoding = inner, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")

    def read(self, size: int = -1) -> bytes:
        while chunk := self._inner.read(size):
            if made := self._decoder.decode(chunk).encode():
                return made
        return b""

    def seek(self, place: int, whence: int = 0) -> int:
        self._decoder.reset()
        return self._inner.seek(place, whence)

    def tell(self) -> int:
        return self._inner.tell()


def _encoding(head: bytes) -> str:
    """Return `utf-16` if the text begins with its mark, or UTF-16 with a byte order if it looks like that without one; else empty."""
    if head[:2] in {codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE}:
        return "utf-16"
    sample = head[:400]
    for encoding, zeros in (("utf-16-le", sample[1::2]), ("utf-16-be", sample[0::2])):
        if len(zeros) >= 8 and zeros.count(0) > 0.8 * len(zeros) and sample.count(0) < 0.6 * len(sample):  # noqa: PLR2004 - letters of the first 256
            return encoding
    return ""


def _joined(runs: list[LoggedRun]) -> list[LoggedRun]:
    """Join numbers that Mlflow keeps in one file each, below a folder `metrics`, into one run."""
    made: list[LoggedRun] = []
    by_folder: dict[str, LoggedRun] = {}
    for run in runs:
        parts = Path(run.file).parts
        if "metrics" not in parts[:-1] or len(run.names()) != 1 or run.number:
            made.append(run)
            continue
        place = parts.index("metrics")
        name, folder = naming.tidy("/".join(parts[place + 1 :])), str(Path(*parts[:place]))
        (series,) = run.by_rank[0].values()
        if folder not in by_folder:
            by_folder[folder] = LoggedRun(run.file, {0: {}}, run.counted_by)
            made.append(by_folder[folder])
        by_folder[folder].by_rank[0][name] = series
    return made


class _Meter:
    """Counts the bytes of one file that were read, at most its size, because parts may be read twice, and reports progress."""

    def __init__(self, progress: Progress, before: int, size: int, total: int) -> None:
        self._progress, self._before, self._size, self._total = progress, before, size, total
        self._num = 0

    def read(self, num: int) -> None:
        """Add this many bytes."""
        self._num += num
        self._progress(self._before + min(self._num, self._size), self._total)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _files(paths: Sequence[Path], found: Found) -> Iterator[Path]:
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        for number, one in enumerate(_inside(path) if path.is_dir() else [path]):
            if number >= MAX_FILES:
                found.failures.append(f"{path} holds more than {MAX_FILES:,} files: the first {MAX_FILES:,} were read")
                break
            if not one.is_file():
                if not path.is_dir():
                    raise UsageError(f"{path} is no file and no folder")
                continue
            if one.resolve() not in seen:
                seen.add(one.resolve())
                yield one


def _inside(path: Path) -> Iterator[Path]:
    """Yield every file below a folder, one at a time, because there may be millions."""
    for folder, folders, names in os.walk(path):
        _pruned(folders)
        yield from (Path(folder) / name for name in sorted(names))


def _pruned(folders: list[str]) -> None:
    folders[:] = sorted(name for name in folders if name not in SKIPPED)


def _read_file(path: Path, size: int, found: Found, flights: list[Path], report: Callable[[int], None]) -> None:
    file = str(path)
    with path.open("rb") as raw:
        head = raw.read(HEAD)
        raw.seek(0)
        stream: BinaryIO = raw
        if head[:2] == b"\x1f\x8b":
            stream = cast("BinaryIO", _Bounded(gzip.GzipFile(fileobj=raw)))
            head, size = stream.read(HEAD), size * 12
            stream.seek(0)
        if encoding := _encoding(head):
            stream = cast("BinaryIO", _Recoded(stream, encoding))
            head = stream.read(HEAD)
            stream.seek(0)
        if not head.strip():
            found.remarks.append(f"{file} is empty")
        elif events.is_tensorboard(head):
            events.read_tensorboard(file, stream, found)
        elif events.is_wandb(head):
            events.read_wandb(file, stream, found)
        elif head[:1] == b"\x80" or dumps.rank_in_name(path.name) is not None and dumps.looks_like_a_dump(head):  # noqa: RUF021
            flights.append(path)
        elif (shapes := _safetensors(file, head, size)) is not None:
            found.tables.append(shapes)
        elif (what := _binary(head)) is not None:
            found.remarks.append(f"{file} is {what}, and was skipped")
        else:
            _read_text(path, head.decode("utf-8", "replace"), stream, size, found, flights, report)
            return
    report(size)


def _binary(head: bytes) -> str | None:
    known = next((what for begin, what in _BINARY.items() if head.startswith(begin)), None)
    if known:
        return known
    sample = head[:4096]
    odd = sum(byte < 9 or 13 < byte < 27 for byte in sample)  # noqa: PLR2004 - control characters but for tabs, line ends and escape
    return "binary" if odd > 0.02 * len(sample) or b"\x00\x00\x00" in sample else None


def _safetensors(file: str, head: bytes, size: int) -> Shapes | None:
    """Return the names and shapes in the header of a file of weights; None if it is none."""
    if len(head) < 16 or head[8:9] != b"{":  # noqa: PLR2004 - its length, and a table
        return None
    (length,) = struct.unpack("<Q", head[:8])
    if not 2 < length < min(size, MAX_HEADER):  # noqa: PLR2004 - an empty table
        return None
    with Path(file).open("rb") as stream:
        stream.seek(8)
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return None
    entries = tuple(
        (name, tuple(entry["shape"]), tables.class_of(name))
        for name, entry in header.items()
        if isinstance(entry, dict) and isinstance(entry.get("shape"), list)
    )
    return Shapes(file, entries) if entries else None


def _read_text(  # noqa: C901, PLR0911, PLR0912, PLR0913, PLR0917 - one question after another
    path: Path, head: str, stream: BinaryIO, size: int, found: Found, flights: list[Path], report: Callable[[int], None]
) -> None:
    file, begin = str(path), head.lstrip("﻿ \t\r\n")
    if _JSON.match(begin):
        is_read = (
            _read_json(path, stream, found, flights, report)
            if size <= MAX_WHOLE
            else _read_large_json(file, begin, stream, found, report)
        )
        if is_read:
            return
        stream.seek(0)
    if separator := tables.looks_like_csv(head.lstrip("﻿")):
        stream.seek(0)
        if tables.read_csv(file, _numbered(stream, size, report), separator, found):
            return
    if tables.looks_numeric(head):
        stream.seek(0)
        if tables.read_numeric(file, path.name, _numbered(stream, size, report), found):
            return
    stream.seek(0)
    if size <= codes.MAX_BYTES:
        text = stream.read(4 * codes.MAX_BYTES).decode("utf-8", "replace")
        stream.seek(0)
        if codes.looks_like_code(text):
            found.code.append(Code(file, text))
            return
        if (shapes := tables.read_shapes(file, text)) is not None:
            found.tables.append(shapes)
            return
        if path.parent.name == "params" and "\n" not in text.strip() and len(text) < 300:  # noqa: PLR2004 - mlflow keeps a setting a file
            found.configs.append(Config(file, {path.name: text.strip()}))
            return
    before = (len(found.runs), len(found.errors), len(found.configs))
    TextReader(file, found).read(stream, size, report)
    if size <= codes.MAX_BYTES and not any(map(_is_log, found.runs[before[0] :])) and len(found.errors) == before[1]:
        if _says_one_word(path, text, found):
            return
        if (config := configs.from_text(file, text)) is not None:
            del found.runs[before[0] :], found.configs[before[2] :]
            found.configs.append(config)
            return
        # Mlflow's files of tags hold nothing of use and deserve no remark.
        if (len(found.runs), len(found.errors), len(found.configs)) == before and path.parent.name != "tags":
            found.remarks.append(f"{path} holds no numbers, errors or settings that are known here, and was skipped")


def _is_log(run: LoggedRun) -> bool:
    """Whether a run has more points than a file of settings would have numbers under one name."""
    is_loss_repeated = any(naming.role(name) == "loss" and len(run.points(name)) > 1 for name in run.names())
    return run.num_points > 2 or is_loss_repeated  # noqa: PLR2004 - as above


def _says_one_word(path: Path, text: str, found: Found) -> bool:
    """Keep a text's lines as samples of a model if many of them repeat one word; return whether they do."""
    lines = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if len(line.split()) >= 4 and not _ASKED.match(line)  # noqa: PLR2004 - a sentence
    ]
    repeated = [(number, line) for number, line in lines if repetition(line) > 0.6]  # noqa: PLR2004 - most of its words
    if len(repeated) < 3 or len(repeated) < 0.3 * len(lines):  # noqa: PLR2004 - not by chance
        return False
    found.samples.extend(WrittenSample(str(path), number, line) for number, line in lines[: tables.MAX_SAMPLES])
    return True


def repetition(text: str) -> float:
    """Return the share of the commonest word in a text; 0 if it has no words."""
    parts = text[:MAX_SENTENCE].split()
    return max((parts.count(word) for word in set(parts[:400])), default=0) / len(parts) if parts else 0.0


def _numbered(
    stream: BinaryIO, size: int, report: Callable[[int], None], row_begins: bytes = b""
) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of lines that are not empty, each cut to a bound.

    Of a large file, yield an even choice, all lines with non-finite numbers, and all that begin differently from a row.
    """
    number, rest = 1, b""
    while chunk := stream.read(MAX_ROW):
        report(len(chunk))
        *whole, rest = (rest[:MAX_ROW] + chunk).split(b"\n")
        stride = max(1, len(whole) // PER_CHUNK) if size > LARGE else 1
        for place, line in enumerate(whole):
            if (number == 1 or place % stride == 0 or b"nan" in line or b"NaN" in line or b"nf" in line or not line.lstrip().startswith(row_begins)) and line.strip():  # fmt: skip
                yield number + place, line[:65_536].decode("utf-8", "replace").rstrip("\r")
        number += len(whole)
    if rest.strip():
        yield number, rest[:65_536].decode("utf-8", "replace").rstrip("\r")


def _read_large_json(file: str, begin: str, stream: BinaryIO, found: Found, report: Callable[[int], None]) -> bool:
    """Read a JSON file piece by piece: JSON lines line by line, anything else by its objects that contain no others; return whether it had rows."""
    if begin.partition("\n")[0].rstrip().endswith("}"):
        return tables.read_json_lines(file, _numbered(stream, LARGE + 1, report, b"{"), found) > 0
    num = tables.salvage(file, _pieces(stream, report), found, PER_CHUNK)
    if num:
        found.remarks.append(f"{file} is too large to be read at once: {num:,} rows of it are used")
    return num > 0


def _pieces(stream: BinaryIO, report: Callable[[int], None]) -> Iterator[str]:
    while piece := stream.read(MAX_ROW):
        report(len(piece))
        yield piece.decode("utf-8", "replace")


def _read_json(path: Path, stream: BinaryIO, found: Found, flights: list[Path], report: Callable[[int], None]) -> bool:
    file, content = str(path), stream.read(MAX_WHOLE)
    stream.seek(0)
    text = content.decode("utf-8", "replace")
    try:
        whole = tables.loads(text)
    except ValueError:
        first = text.lstrip("﻿ \r\n").partition("\n")[0]
        if first.rstrip().endswith("}") and "\n" in text.strip():
            is_lines = tables.read_json_lines(file, tables.lines_of(text), found) > 0
            report(len(content) if is_lines else 0)
            return is_lines
        if num := tables.salvage(file, [text], found) if '"' in text[:2000] and "'" not in first[:20] else 0:
            found.failures.append(f"{file} is no whole JSON: {num} rows of it are used")
            report(len(content))
            return True
        return False
    report(len(content))
    if isinstance(whole, dict):
        _read_object(path, whole, found, flights)
        return True
    if isinstance(whole, list):
        return tables.read_history(file, whole, found) > 0
    return False


def _read_object(path: Path, whole: dict[str, Any], found: Found, flights: list[Path]) -> None:
    file = str(path)
    if "entries" in whole or "pg_config" in whole:
        flights.append(path)
    elif isinstance(whole.get("log_history"), list):
        tables.read_history(file, whole["log_history"], found)
        if config := configs.from_json(
            file, {name: value for name, value in whole.items() if name not in {"log_history", "best_metric"}}
        ):
            found.configs.append(config)
    elif isinstance(whole.get("artifacts"), dict):
        _read_package(path, whole, found)
    elif isinstance(whole.get("history"), (dict, list)):
        history = whole["history"]
        _ = (
            tables.series_of(file, history, found)
            if isinstance(history, dict)
            else tables.read_history(file, history, found)
        )
    elif tables.series_of(file, whole, found):
        return
    elif (shapes := _shapes(file, whole)) is not None:
        found.tables.append(shapes)
    elif config := configs.from_json(file, whole):
        found.configs.append(config)
        if any("loss" in name for name in config.values) and "step" in config.values:
            tables.read_history(file, [whole], found)


def _shapes(file: str, whole: dict[str, Any]) -> Shapes | None:
    """Read a table of shapes: `{"wte.weight": [50257, 768], ...}`."""
    entries = tuple(
        (name, tuple(shape), tables.class_of(name))
        for name, shape in whole.items()
        if isinstance(shape, list) and shape and all(isinstance(size, int) for size in shape)
    )
    return Shapes(file, entries) if len(entries) > 2 and len(entries) >= 0.8 * len(whole) else None  # noqa: PLR2004 - fewer are chance


def _read_package(path: Path, whole: dict[str, Any], found: Found) -> None:
    """Read a context package: artifacts are files beside it, or texts in it."""
    found.task = str(whole.get("task") or "")[:2000]
    found.symptoms.extend(_texts(whole.get("symptoms")))
    found.constraints = whole.get("constraints", [])
    for kind, value in whole["artifacts"].items():
        file = f"{path}#{kind}"
        rows = value if isinstance(value, list) and all(isinstance(one, (dict, list)) for one in value) else []
        if len(rows) > 1 and tables.read_history(file, rows, found):
            continue
        if isinstance(value, list) and value and all(isinstance(one, (int, float)) for one in value):
            tables.series_of(file, {"loss": value}, found)
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str):
                _artifact(path, kind, one, found)
            elif isinstance(one, dict):
                columns = {_as_loss(name) if "loss" in kind else name: column for name, column in one.items()}
                is_series = tables.series_of(file, columns, found)
                config = None if is_series else configs.from_json(file, one)
                found.configs.extend([config] if config else [])


def _artifact(path: Path, kind: str, said: str, found: Found) -> None:
    """Read an artifact: the name of a file beside the package, or a text."""
    beside = path.parent / said if "\n" not in said and len(said) < 1024 else path  # noqa: PLR2004 - a name of a file
    # Only other files below the package's folder are read: the rest may not be meant to be shown, and a package that names itself would never end.
    is_below = path.parent.resolve() in beside.resolve().parents and beside.resolve() != path.resolve()
    if is_below and beside.is_file():
        try:
            inner = read([beside])
        except UsageError as error:
            found.failures.append(str(error))
            return
        for name in ("runs", "errors", "configs", "code", "tables", "samples", "remarks", "failures"):
            getattr(found, name).extend(getattr(inner, name))
    elif _FILE_NAME.fullmatch(said.strip()):
        found.absent.append(said.strip())
    elif said.strip():
        _inline(f"{path}#{kind}", said, found)


def _as_loss(name: str) -> str:
    """Return the name of a curve under `loss_curves`: `train` and `val` are curves of the loss."""
    words = set(naming.words(name))
    return f"{name}_loss" if words and words <= naming.HELD_OUT | {"train", "training"} else name


_FILE_NAME = re.compile(r"[\w./\\ -]{1,200}\.[A-Za-z]\w{0,9}")


def _texts(said: object) -> list[str]:
    """Return a text, or a list of texts, as a list of bounded length; empty if there is none."""
    return [str(one)[:2000] for one in said[:100]] if isinstance(said, list) else [str(said)[:2000]] if said else []


def _inline(file: str, text: str, found: Found) -> None:
    if codes.looks_like_code(text):
        found.code.append(Code(file, text))
    elif config := configs.from_text(file, text):
        found.configs.append(config)
    else:
        TextReader(file, found).read_text(text)


def _read_dumps(paths: list[Path], found: Found) -> None:
    try:
        found.dumps = dumps.read_dumps(paths)
        found.remarks.extend(found.dumps.remarks)
        found.failures.extend(found.dumps.failures)
    except UsageError as error:
        found.failures.append(str(error))


def _nothing(paths: Sequence[Path], found: Found) -> str:
    said = [*found.failures, *found.remarks]
    more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
    nothing = "it holds no numbers, errors or settings that are known here" if found.files else "there is no file"
    reason = f": {said[0]}{more}" if said else f": {nothing}"
    return f"nothing in {', '.join(map(str, paths[:4]))} can be judged{reason}"
