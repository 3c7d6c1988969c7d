"""Reads tables of numbers: CSV of any tool, JSON and JSON lines, `trainer_state.json`, two columns, mlflow's metric files.

A table that is cut off in the middle is used as far as it goes.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from holter.offline.errors import ErrorReader
from holter.offline.found import Found, Shapes, WrittenSample
from holter.offline.lines import plain
from holter.offline.recorder import RowRecorder, add_values, as_number

MAX_DEPTH = 6
_FLAT = re.compile(r"\{[^{}]{0,65536}\}")
_LAX = re.compile(r"\b(nan|inf|-inf|-?Inf)\b")
_WRITTEN = (
    "completion",
    "output",
    "generated",
    "generated_text",
    "response",
    "prediction",
    "sample",
    "text",
    "completions",
    "answer",
)
"""Keys under which tools keep the outputs of a model."""
_ASKED = frozenset({"prompt", "input", "question", "instruction", "query", "prompts", "inputs"})
MAX_SAMPLES = 2000
MAX_COLUMNS = 4
MAX_OBJECT = 65_536
"""Largest number of characters in one row's object."""
HEADER_WORDS = re.compile(r"[A-Za-z]")


def loads(text: str) -> Any:
    """Parse JSON as tools write it, with bare NaN, Infinity and nan; raise ValueError if the text is no JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        return json.loads(
            _LAX.sub(
                lambda found: {"nan": "NaN", "inf": "Infinity", "Inf": "Infinity"}.get(found.group(1), "-Infinity"),
                text,
            )
        )


def read_history(file: str, history: Iterable[Any], found: Found, first_line: int = 1) -> int:
    """Read the rows of a list such as `log_history`; return how many of its entries were rows."""
    recorder = RowRecorder(file)
    num = 0
    for number, row in enumerate(history):
        if isinstance(row, dict):
            add_values(recorder, flat(row), first_line + number)
            num += 1
            _sample(file, row, first_line + number, found)
        elif isinstance(row, list) and 1 < len(row) <= MAX_COLUMNS and all(isinstance(one, (int, float)) for one in row):  # fmt: skip
            _add_unnamed(recorder, [float(one) for one in row], first_line + number, _tag_of(file))
            num += 1
    found.runs.extend(run for run in recorder.runs() if run.names())
    return num


def _tag_of(file: str) -> str:
    """Return the tag in the name of a file downloaded from TensorBoard's page; otherwise `loss`."""
    return file.rpartition("tag-")[2].removesuffix(".json") if "tag-" in file else "loss"


def _sample(file: str, row: Mapping[str, Any], line: int, found: Found) -> None:
    """Keep the model's output as a sample, if a row has one beside a prompt or under a key that names an output."""
    keys = {str(key).lower(): value for key, value in row.items()}
    written = next((keys[name] for name in _WRITTEN if isinstance(keys.get(name), str)), None)
    is_answer = bool(_ASKED & set(keys)) or any(name in keys for name in _WRITTEN[:6])
    if isinstance(written, str) and is_answer and len(found.samples) < MAX_SAMPLES:
        found.samples.append(WrittenSample(file, line, written[:4000]))


def flat(row: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, object]:
    """Flatten `{"train": {"loss": 1}}` to `{"train/loss": 1}`."""
    made: dict[str, object] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and depth < MAX_DEPTH:
            made |= flat(value, f"{name}/", depth + 1)
        elif isinstance(value, (int, float, str)):
            made[name] = value
    return made


def read_json_lines(file: str, lines: Iterable[tuple[int, str]], found: Found) -> int:
    """Read one JSON object per line, and errors from other lines; return how many lines were rows.

    Return 0, with nothing kept, for a log in which most lines are not JSON.
    """
    recorder, errors = RowRecorder(file), ErrorReader(file)
    num = num_others = 0
    for number, line in lines:
        text = line.strip().rstrip(",")
        if not text.startswith("{"):
            num_others += bool(text)
            errors.line(plain(line.rstrip("\n")), number, recorder.last_step, recorder.num_rows)
            continue
        try:
            row = loads(text)
        except ValueError:
            continue
        if isinstance(row, dict):
            num += 1
            add_values(recorder, flat(row), number)
            _sample(file, row, number, found)
    if num_others > num and recorder.num_rows < num_others:
        return 0
    _keep(recorder, errors, found)
    return num


def _keep(recorder: RowRecorder, errors: ErrorReader, found: Found) -> None:
    found.runs.extend(run for run in recorder.runs() if run.names())
    found.errors.extend(errors.finish(recorder.last_step, recorder.num_rows))


def salvage(file: str, pieces: Iterable[str], found: Found, at_most: int = 10**9) -> int:
    """Read a JSON file that ends too early or is too large; return how many rows there were.

    Every complete object that contains no others is read, or about `at_most` of each piece and all with NaN or of evaluations.
    """
    return read_history(file, _whole_objects(pieces, at_most), found)


def _whole_objects(pieces: Iterable[str], at_most: int) -> Iterator[dict[str, Any]]:
    rest = ""
    for piece in pieces:
        text, end = rest + piece, 0
        objects = [match.span() for match in _FLAT.finditer(text)]
        stride = max(1, len(objects) // at_most)
        for place, (begin, end) in enumerate(objects):
            if place % stride and "N" not in text[begin:end] and "eval" not in text[begin:end]:
                continue
            try:
                row = loads(text[begin:end])
            except ValueError:
                continue
            if isinstance(row, dict) and any(as_number(value) is not None for value in row.values()):
                yield row
        # An object that is cut in two begins near the end.
        rest = text[max(end, len(text) - MAX_OBJECT) :]


def series_of(file: str, columns: Mapping[str, list[Any]], found: Found) -> bool:
    """Read `{"loss": [2.3, 2.1, ...], "val_loss": [...]}`, as Keras saves its history; return whether the columns are series."""
    known = {
        name: column
        for name, column in columns.items()
        if isinstance(column, list) and len(column) > 1 and all(as_number(value) is not None for value in column)
    }
    if not known:
        return False
    steps = next(
        (
            column
            for name, column in known.items()
            if str(name).lower() in {"step", "steps", "epoch", "epochs", "iter", "iteration"}
        ),
        None,
    )
    recorder = RowRecorder(file)
    for place in range(max(map(len, known.values()))):
        row: dict[str, object] = {
            name: column[place] for name, column in known.items() if place < len(column) and column is not steps
        }
        at = as_number(steps[place]) if steps is not None and place < len(steps) else None
        add_values(recorder, row, 1, step=int(at) if at is not None else place + 1)
    found.runs.extend(run for run in recorder.runs() if run.names())
    return True


def looks_like_csv(head: str) -> str:
    """Return the separator of a table whose first line names its columns; empty if the text is no such table."""
    first, _, rest = head.partition("\n")
    second = next((line for line in rest.replace("\r", "\n").split("\n") if line.strip()), "")
    for separator in (",", "\t", ";"):
        names, cells = first.rstrip("\r").split(separator), second.split(separator)
        is_header = len(names) > 1 and all(
            HEADER_WORDS.search(name) and as_number(name) is None and len(name) < 120  # noqa: PLR2004
            for name in names
            if name.strip()
        )
        if (
            is_header
            and abs(len(names) - len(cells)) <= 1
            and any(as_number(cell.strip('"')) is not None for cell in cells)
        ):
            return separator
    return ""


def read_csv(file: str, lines: Iterable[tuple[int, str]], separator: str, found: Found) -> int:
    """Read rows, in which empty cells were not logged; return how many there were.

    A script may have printed errors below them, which are read, too.
    """
    recorder, errors, names, num = RowRecorder(file), ErrorReader(file), [""], 0
    for number, line in lines:
        try:
            cells = next(csv.reader([line.replace("\x00", "")], delimiter=separator), [])
        except csv.Error:
            continue
        if number == 1:
            names = [name.strip().strip("﻿\"'") for name in cells]
        elif not any(as_number(cell) is not None for cell in cells):
            errors.line(plain(line), number, recorder.last_step, recorder.num_rows)
        else:
            add_values(recorder, dict(zip(names, cells, strict=False)), number)
            num += 1
    _keep(recorder, errors, found)
    return num


def looks_numeric(head: str) -> int:
    """Return the number of columns of a file whose lines are only numbers; 0 if it has other lines."""
    rows = [
        line.replace(",", " ").split()
        for line in head.splitlines()[:40]
        if line.strip() and not line.lstrip().startswith("#")
    ][:-1] or [line.replace(",", " ").split() for line in head.splitlines() if line.strip()]
    if len(rows) < 3 or len({len(row) for row in rows}) != 1:  # noqa: PLR2004 - fewer are chance
        return 0
    return (
        len(rows[0])
        if 1 <= len(rows[0]) <= 4 and all(as_number(cell) is not None for row in rows for cell in row)  # noqa: PLR2004
        else 0
    )


def read_numeric(file: str, name: str, lines: Iterable[tuple[int, str]], found: Found) -> int:
    """Read columns without names: loss; step and loss; mlflow's time, value, step. Return how many rows there were."""
    recorder = RowRecorder(file)
    num = 0
    for number, line in lines:
        cells = [as_number(cell) for cell in line.replace(",", " ").split()]
        if not cells or None in cells:
            continue
        _add_unnamed(recorder, [cell for cell in cells if cell is not None], number, name)
        num += 1
    found.runs.extend(run for run in recorder.runs() if run.names())
    return num


def _add_unnamed(recorder: RowRecorder, values: list[float], line: int, name: str) -> None:
    """Add a row of one to four numbers: loss; step and loss; mlflow's time, value, step; TensorBoard's time, step, value."""
    if len(values) == 3 and values[0] > 1e11:  # noqa: PLR2004 - milliseconds since the epoch
        add_values(recorder, {name: values[1]}, line, step=int(values[2]))
    elif len(values) == 3 and values[0] > 1e9 and values[1].is_integer():  # noqa: PLR2004 - seconds since the epoch
        add_values(recorder, {name: values[2]}, line, step=int(values[1]))
    elif len(values) == 1:
        add_values(recorder, {"loss": values[0]}, line, step=line)
    else:
        step = int(values[0]) if abs(values[0]) < 1e15 and values[0] == values[0] else None  # noqa: PLR2004
        add_values(recorder, dict(zip(("loss", "eval_loss", "column_4"), values[1:], strict=False)), line, step=step)


_SHAPE = re.compile(r"^\W*([\w.]+)\W+\(?(?:torch\.Size\()?[\[(]\s*(\d+(?:\s*,\s*\d+)*)\s*,?\s*[\])]")
_COUNT = re.compile(r"^\W*([A-Za-z][\w.]*)[\s|:=│]+(?:(?:[A-Za-z]\w*)[\s|│]+)?([\d][\d,.]*)\s*([KMB])?\b")


def read_shapes(file: str, text: str) -> Shapes | None:
    """Read a table of parameters, with a name and a shape or count on each line; return None if the text is no such table."""
    entries: list[tuple[str, tuple[int, ...], str]] = []
    lines = text.splitlines()
    for line in lines[:20_000]:
        if (match := _SHAPE.match(line)) and "." in match.group(1):
            shape = tuple(int(part) for part in match.group(2).split(","))
            entries.append((match.group(1), shape, class_of(match.group(1))))
    if len(entries) >= 3 and 2 * len(entries) >= sum(bool(line.strip()) for line in lines):  # noqa: PLR2004 - fewer are chance
        return Shapes(file, tuple(entries))
    return _counts(file, lines)


def _counts(file: str, lines: list[str]) -> Shapes | None:
    entries: list[tuple[str, tuple[int, ...], str]] = []
    is_said = any("param" in line.lower() for line in lines[:40])
    for line in lines[:20_000]:
        if (
            (match := _COUNT.match(line))
            and "total" not in match.group(1).lower()
            and match.group(1).lower() not in {"parameters", "params", "model"}
        ):
            number = as_number(match.group(2))
            factor = {"K": 1e3, "M": 1e6, "B": 1e9}.get(match.group(3) or "", 1)
            if number is not None and number >= 1:
                entries.append((match.group(1), (int(number * factor),), class_of(match.group(1))))
    # A log repeats its names, a table of parameters does not.
    is_said = is_said and len({name for name, _, _ in entries}) > 0.8 * len(entries)
    is_table = is_said and len(entries) >= 3 and 2 * len(entries) >= sum(bool(line.strip()) for line in lines)  # noqa: PLR2004 - fewer are chance
    return Shapes(file, tuple(entries)) if is_table else None


def class_of(name: str) -> str:
    """Return the class that a tensor's name shows, which is only known for embeddings; otherwise empty."""
    low = name.lower()
    return (
        "Embedding"
        if "emb" in low or low.rpartition(".")[0].endswith(("wte", "wpe", "shared")) or low in {"wte", "wpe"}
        else ""
    )


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of a text's lines, counted from 1."""
    yield from enumerate(io.StringIO(text), start=1)
