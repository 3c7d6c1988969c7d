"""Parses one line of a log into the numbers in it. It knows no tool by name, only how people write numbers down.

    {'loss': 2.6, 'grad_norm': '1.05'}     loss: 2.6 | lr 6e-4 | norm: 0.3     step:7 - actor/kl:np.float64(0.1)     loss=2.6, lr=[1e-4]
    Epoch 3/10   Epoch [3][100/500]   iteration  4200/ 100000   45%|####  | 45/100 [00:10<00:12]

Pure: text in, numbers out.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from holter.offline import naming

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?|NaN|NAN|Infinity)"
_NAME = r"[A-Za-z_][\w/.@%-]*(?:\([\w/%]+\))?"
_PAIR = re.compile(
    rf"({_NAME}(?: {{1,2}}[A-Za-z(][\w/.@()%-]*){{0,4}})['\"]?\s*[:=]\s*(?:np\.float\d*\(|tensor\(|\[)?['\"]?({_NUMBER})(?![\w]*:[\d])(?![a-z%]\}})([KMB](?!\w))?"
)
_SPACED = re.compile(
    rf"(?<![\w/])((?:train(?:ing)?|val(?:idation)?|valid|test|eval|lm) loss|loss|lr|norm|grad norm|grad_norm|step|iter|iteration|epoch|ppl|train_loss|val_loss"
    rf")\s*\[?\s*({_NUMBER})(?![\w:]*[A-Za-z:])",
    re.IGNORECASE,
)
_SAID = re.compile(
    rf"(?<![\w/])((?:[A-Za-z_]\w* ){{0,2}}(?:\w*loss|accuracy|perplexity|reward|learning rate))\s+is\s+({_NUMBER})(?![\w])",
    re.IGNORECASE,
)
"""Matches `total loss is 48.44`."""
_EPOCH = re.compile(
    r"(?<![\w])(?:train(?:ing)?\s+)?epoch(?:\s*\(train\))?\s*[:#]?\s*\[?\s*(\d+(?:\.\d+)?)\s*(?:(?:/|of)\s*(\d+))?\s*\]?"
    r"(?:\s*[,|:;\-]*\s*(?:(?:step|batch|iter(?:ation)?|it)\b)?\s*:?\s*\[?\s*(\d+)\s*/\s*(\d+))?",
    re.IGNORECASE,
)
_COUNTER = re.compile(
    r"(?<![\w/.-])(?:global[ _])?(?:step|iter|iteration|update)s?\s*[:=#]?\s*\[?\s*(\d+)\]?\s*(?::(?!\d)|[,|;\])(-]|\s[A-Za-z]|$)",
    re.IGNORECASE,
)
"""Matches a counter in front of what was measured: `iter 250: loss 2.1`, `[Step 40] loss ...`."""
_PADDED = re.compile(r"\[([ \d]{3,}(?<=\d))\](?!:\s*\[)")
"""Matches a counter padded to the width of its last value: `[   50] loss 2.1`."""
_CELL = re.compile(rf"^\s*({_NAME}(?: [A-Za-z_][\w/-]*){{0,3}})\s+({_NUMBER})%?\s*$")
"""Matches one of several cells between bars: `gnorm 0.390`."""
MIN_CELLS = 3
_TABLE_CELL = re.compile(rf"^\|\s*([A-Za-z][\w/ .-]*?)\s*\|\s*({_NUMBER})?\s*\|$")
MIN_RULE = 8
"""Number of characters of the line that ends a table."""
_HELD_OUT_LINE = re.compile(
    r"(?:^|[|\]>]|\s-\s)\s*[*\[(]?(?:val|valid|validation|test|testing|eval|evaluation|dev)\b(?: set| epoch| phase| results?| step)?(?:\s*(?:[:|\])\[#-]|\d)|\s{2,}[a-z]+\s*[=:])"
    r"|valid on '|validation loss at|Epoch\s*\((?:val|test)\)",
    re.IGNORECASE,
)
"""Matches a line about held-out data whose names do not say so: `Test set: Average loss: 0.05`, `| valid | epoch 002 |
loss 9.3`."""
_OF = re.compile(r"(?<![\w/])(step|iter(?:ation)?|it|batch)s?\s*[:=#]?\s*\[?\s*(\d+)\s*/\s*(\d+)", re.IGNORECASE)
_BAR = re.compile(r"([^|\]]*?)(\d{1,3})%\|[^|]*\|\s*(\d+)/(\d+)\s*\[")
_OTHER_BARS = re.compile(
    r"map|filter|download|load|token|eval|valid|test|generat|sampl|rollout|sanity|fetch|group|pack|convert|sav|predict|process|shard|extract|rank",
    re.IGNORECASE,
)
"""Words in front of progress bars that count something other than training steps."""
_KERAS = re.compile(r"^\s*(\d+)/(\d+)\s+(?:\[|\S*━|\x1b)")
_VALUE = re.compile(r"\d|nan|inf")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2212", "''\"\"-")
_HEADER = re.compile(r"^\s*(?:[A-Za-z][\w./@()%-]*(?: {2,}|\t\s*)){2,}[A-Za-z][\w./@()%-]*\s*$")
"""Matches names of columns, as YOLO prints them above its numbers."""
_TITLE = re.compile(r"^[A-Za-z][A-Za-z_/.@()%-]*(?: [/A-Za-z_.@()%-]+){0,5}$")
"""Matches a cell of a table's first line."""
_COLUMN = re.compile(rf"^(?:(\d+)/\d+|({_NUMBER})([GMK])?i?B?:?|(\d+(?::\d\d)+))$")
NOTHING_YET = frozenset({"", "No log", "-", "None"})
"""Cells of a table that have no number yet."""
_YOLO = "gpu_mem"
_YOLO_TERMS = {"box": "box_loss", "obj": "obj_loss", "cls": "cls_loss", "dfl": "dfl_loss", "total": "loss"}
"""Names of loss terms in YOLO's older versions, which leave out the word `loss`."""
_RANK = re.compile(
    r"^\s*(?:\[\d+\]\s*)?\[(?:rank|default)\s*(\d{1,6})\]:?|^(\d{1,6}): |\[Rank (\d{1,6})\]|(?<![\w])rank[=: ](\d{1,6})(?!\d)",
    re.IGNORECASE,
)
_SUFFIX = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}
_UNIT = {"GiB": 1.0, "MiB": 2**-10, "GB": 1.0, "MB": 1e-3, "G": 1.0, "M": 2**-10}
_TIMES = frozenset(
    {
        "time",
        "eta",
        "elapsed",
        "dt",
        "ms",
        "sec",
        "seconds",
        "tps",
        "tok",
        "mfu",
        "throughput",
        "samples",
        "tokens",
        "it/s",
        "speed",
    }
)
_UNITS = frozenset({"s", "sec", "images", "img", "batch", "batches", "examples", "sequences", "step", "second"})
_SOURCES = (".py", ".cpp", ".cc", ".cu", ".h", ".cuh", ".hpp", ".rs", ".go", ".js")
LIKELY = (
    "loss",
    "trl:",
    "tel:",
    "reward",
    "grad",
    "norm",
    "acc",
    "entropy",
    "ppl",
    "perplexity",
    "kl",
    "epoch",
    "step",
    "iter",
    "%|",
    "lr",
)
"""A line without any of these words, in lower case, has no number of interest."""


@dataclass
class LogRow:
    """The numbers of one line."""

    values: dict[str, float]
    step: int | None = None
    epoch: float | None = None
    total: int | None = None
    """Number of steps in an epoch or in the run, if the line says so."""
    within_epoch: bool = False
    """Whether the line's step counts within the epoch."""
    rank: int | None = None
    rounded_to: int = 1
    """Unit of the step: `step:12K` is rounded to a thousand steps."""


@dataclass
class LineContext:
    """What earlier lines of the same file said and later lines do not repeat."""

    epoch: float | None = None
    bar_step: int | None = None
    bar_used: bool = True
    seen: dict[str, int] = field(default_factory=dict)
    table: dict[str, str] = field(default_factory=dict)
    """Names and numbers of a table that is being printed, one per line."""
    section: str = ""
    width: int = 0
    """Number of characters between brackets in the last counter that begins with blanks or zeros; 0 before the first."""
    columns: tuple[str, ...] = ()
    """Names of columns from the last line of names, for the numbers below it."""


def plain(line: str) -> str:
    """Remove colours, and replace typographic quotes, which forums and editors insert, by plain ones."""
    line = _COLOURS.sub("", line) if "\x1b" in line else line
    return line if line.isascii() else line.translate(_QUOTES)


def rank_of(line: str) -> int | None:
    """Return the rank that a line names; None if it names none."""
    found = _RANK.search(line[:160])
    return int(next(group for group in found.groups() if group is not None)) if found else None


def number(text: str) -> float:
    """Convert text such as `7,282`, `5.1E+00` or `nan` to a float."""
    return float(text.replace(",", ""))


def parse(line: str, context: LineContext) -> LogRow | None:
    """Return the row that a line holds; None if it holds none."""
    if (table := _of_table(line, context)) is not None:
        return table or None
    if (row := _of_columns(line, context)) is not None:
        return row
    low = line.lower()
    if not any(word in low for word in LIKELY) or not _VALUE.search(low):
        return None
    row = LogRow({})
    _progress(line, row, context)
    _numbers(line, row)
    if row.step is None and (counter := _COUNTER.search(line)):
        row.step = int(counter.group(1))
    if row.step is None and row.values and "[" in line:
        row.step = _padded(line, context)
    if not row.values:
        return None
    if _HELD_OUT_LINE.search(line) and not any(naming.is_held_out(name) for name in row.values):
        row.values = {
            f"eval_{name}" if naming.role(name) == "loss" else name: value for name, value in row.values.items()
        }
    if row.epoch is None:
        row.epoch = context.epoch
    row.rank = rank_of(line)
    return row


def _padded(line: str, context: LineContext) -> int | None:
    """Return a counter between brackets, which is one that is padded, or as wide as the last padded one; None if there is none."""
    for text in _PADDED.findall(line):
        if text[0] in " 0":
            context.width = len(text)
        if len(text) == context.width:
            return int(text)
    return None


def _numbers(line: str, row: LogRow) -> None:
    """Add every name with a number in the line to the row."""
    for match in _PAIR.finditer(line):
        _take(row, match.group(1), match.group(2), line[match.end() : match.end() + 4], match.group(3) or "")
    for match in _SPACED.finditer(line):
        _take(row, match.group(1), match.group(2), "")
    for match in _SAID.finditer(line) if " is " in line else ():
        _take(row, match.group(1), match.group(2), "")
    if line.count("|") >= MIN_CELLS:
        for match in filter(None, map(_CELL.match, line.split("|"))):
            _take(row, match.group(1), match.group(2), "")


def _of_table(line: str, context: LineContext) -> LogRow | Literal[False] | None:
    """Return the row of a table of two columns once its last line is printed.

    False while the table continues, None if this is no table.

    | rollout/           |          |
    |    ep_rew_mean     | 22.9     |
    ---------------------------------
    """
    text = line.strip()
    if cell := _TABLE_CELL.match(text):
        name, value = cell.group(1).strip(), cell.group(2) or ""
        if not value and name.endswith("/"):
            context.section = name
        elif value:
            context.table[f"{context.section}{name}"] = value
        return False
    if not context.table or len(text) < MIN_RULE or set(text) - {"-", "+", "="}:
        return None
    row = LogRow({})
    for name, value in context.table.items():
        _take(row, name, value, "")
    context.table, context.section = {}, ""
    return row if row.values else False


def _of_columns(line: str, context: LineContext) -> LogRow | None:
    """Return the row of a line of bare numbers under the names that were printed above it; None if it is none."""
    if names := _column_names(line):
        is_yolo = _YOLO in names
        context.columns = tuple(_YOLO_TERMS.get(name, name) for name in names) if is_yolo else names
        return None
    if not context.columns:
        return None
    cells = _cells(line)
    if len(cells) != len(context.columns):
        cells = line.split(maxsplit=len(context.columns))[: len(context.columns)]
    found = [_COLUMN.match(cell) for cell in cells]
    is_row = all(match or cell in NOTHING_YET for match, cell in zip(found, cells, strict=True)) and any(found)
    if len(found) != len(context.columns) or not is_row:
        return None
    row = LogRow({})
    _progress(line, row, context)
    for name, match in zip(context.columns, found, strict=True):
        if match is None or match.group(4):
            continue
        value = number(match.group(1) or match.group(2))
        if naming.is_epoch(name):
            row.epoch = context.epoch = value
            row.within_epoch = row.step is not None
        elif naming.is_step(name):
            row.step = int(value)
        else:
            row.values.setdefault(name, value * _UNIT.get(match.group(3) or "", 1.0))
    return row if any(map(naming.is_measured, row.values)) else None


def _cells(line: str) -> list[str]:
    """Return the texts between the bars of a table's line; empty if it has no bars."""
    text = line.replace("\u2502", "|").replace("\u2503", "|").strip()
    return [cell.strip() for cell in text.strip("|").split("|")] if text.count("|") > 1 or " | " in text else []


def _column_names(line: str) -> tuple[str, ...]:
    """Return the names of columns if a line holds nothing else: `Epoch   GPU_mem   box_loss`, `| Step | Training Loss |`."""
    if "loss" not in line.lower() and _YOLO not in line:
        return ()
    if _HEADER.match(line):
        return tuple(naming.tidy(word) for word in line.split())
    cells = _cells(line)
    return tuple(map(naming.tidy, cells)) if len(cells) > 1 and all(map(_TITLE.match, cells)) else ()


def note_bar(line: str, context: LineContext) -> re.Match[str] | None:
    """Return the training's progress bar in a line, and remember its step in the context."""
    bars = list(_BAR.finditer(line)) if "%|" in line else []
    bar = bars[-1] if bars else None
    if bar is None or _OTHER_BARS.search(bar.group(1)[-40:]):
        return None
    context.bar_step, context.bar_used = int(bar.group(3)), False
    return bar


def _progress(line: str, row: LogRow, context: LineContext) -> None:
    """Read the counters in a line into the row and the context: epochs, steps and their totals, progress bars."""
    if bar := note_bar(line, context):
        row.step, row.total = int(bar.group(3)), int(bar.group(4))
    if found := _EPOCH.search(line):
        row.epoch = context.epoch = float(found.group(1))
        if found.group(3):
            row.step, row.total, row.within_epoch = int(found.group(3)), int(found.group(4)), True
            # `[Epoch 64 736512/1281167][Iteration 45457]`: samples of the epoch, and the run's own count.
            if (counter := _COUNTER.search(line, found.end())) and int(counter.group(1)) != row.step:
                row.step, row.total, row.within_epoch = int(counter.group(1)), None, False
    elif keras := _KERAS.match(line):
        row.step, row.total, row.within_epoch = int(keras.group(1)), int(keras.group(2)), context.epoch is not None
    if of := _OF.search(line):
        row.step, row.total = int(of.group(2)), int(of.group(3))
        row.within_epoch = row.epoch is not None and of.group(1).lower() in {"batch", "it", "step", "iter"}


def _take(row: LogRow, name: str, text: str, after: str, suffix: str = "") -> None:
    value = number(text) * _SUFFIX[suffix]
    name = _meant(name)
    if not name:
        return
    if naming.is_step(name):
        if naming.counts_the_run(name):
            row.step, row.total, row.within_epoch = None, None, False
        # `update: 0.02` is a share of an epoch.
        if row.step is None and value == value and abs(value) < 1e15 and ("." not in text or text.endswith(".0")):  # noqa: PLR0124, PLR2004 - NaN counts nothing
            row.step, row.rounded_to = int(value), int(_SUFFIX[suffix])
    elif naming.is_epoch(name):
        if row.epoch is None and value == value:  # noqa: PLR0124 - as above
            row.epoch = value
    elif name not in row.values:
        row.values[name] = value * _scale(name, after)


def _scale(name: str, after: str) -> float:
    if naming.role(name) != "memory":
        return 1.0
    return next((factor for unit, factor in _UNIT.items() if after.startswith(unit)), 1.0)


@lru_cache(maxsize=8192)
def _meant(name: str) -> str:
    """Return the words before a number that name it: `step` for `INFO step`; empty for times, speeds and places in code."""
    parts = name.removesuffix(" value").split()
    # `181.2 samples/sec Train-Accuracy=0.5`: the unit of the number before.
    while len(parts) > 1 and set(naming.words(parts[0])) <= _TIMES | _UNITS:
        parts = parts[1:]
    name = " ".join(parts)
    for begin in range(len(parts)):
        candidate = naming.tidy(" ".join(parts[begin:]))
        if len(parts) - begin == 2 and _is_term(parts[begin], candidate):  # noqa: PLR2004 - `box loss`, `D loss`
            return candidate
        if naming.is_step(candidate) or naming.is_epoch(candidate) or naming.role(candidate):
            return candidate
    whole = naming.tidy(name)
    # `graph.py:979` is a place in code.
    return "" if whole.endswith(_SOURCES) or set(naming.words(whole)) & _TIMES else whole


def _is_term(word: str, name: str) -> bool:
    """Whether a word in front of `loss` names one of several losses, and is not just text of the logger."""
    is_logger = word.isupper() and len(word) > 1
    return not is_logger and (naming.is_adversarial(name) or bool(naming.term_of_loss(name)))
