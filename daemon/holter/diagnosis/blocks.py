"""Evidence that is read in columns: stacks and last collectives, as blocks of fixed width.

Ranks wrote what is in them: no line may move a cursor, end its fence or become a tag. Pure.
"""

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from holter.records import Evidence

STACKS, LAST_COLLECTIVES = "stacks", "last_collectives"
MAX_LINES = 200
"""Of one block; the JSON has all."""
BRANCHES = str.maketrans({"├": "│", "└": " ", "─": " "})
MIN_WIDTH = 24
"""Nothing is folded more narrowly."""
TREE = re.compile(r"[ │├└─]*")


@dataclass(frozen=True)
class Block:
    """Lines that keep their places, and what they are."""

    caption: str
    lines: tuple[str, ...]
    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The same side by side, where there is room: who, and their lines."""


def block(evidence: Evidence) -> Block | None:
    """The block that a piece of evidence carries, if it does."""
    if evidence.kind == STACKS:
        made = _made("Stacks of the ranks' main threads, the outermost frame first:", evidence.values, "tree")
        return made and replace(made, columns=tuple(_columns(evidence.values.get("columns"))))
    if evidence.kind == LAST_COLLECTIVES:
        return _made(f"{evidence.summary[:1].upper()}{evidence.summary[1:]}:", evidence.values, "calls")
    return None


def to_text(block: Block, width: int, indent: str) -> list[str]:
    """For the terminal; what is too wide goes on below, within its branch."""
    return [f"{indent}{part}".rstrip() for line in block.lines for part in _folded(line, width - len(indent))]


def to_markdown(block: Block) -> list[str]:
    """Fenced, by a fence that no line can end."""
    longest = max((len(run) for line in block.lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *block.lines, fence]


def to_html(block: Block) -> str:
    """Scrolls by itself; the page does not."""
    caption, text = html.escape(block.caption), html.escape("\n".join(block.lines))
    tree = f'<pre tabindex="0">{text}</pre>'
    if len(block.columns) > 1:
        tree = f"{_side_by_side(block)}<details><summary>As one tree</summary>{tree}</details>"
    return f'<figure class="block"><figcaption>{caption}</figcaption>{tree}</figure>'


def printable(text: str) -> str:
    """Names come from the training script: none of them may move the cursor."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _made(caption: str, values: Mapping[str, object], key: str) -> Block | None:
    said = values.get(key)
    if not isinstance(said, (list, tuple)) or not said:
        return None
    lines = [_line(entry) for entry in said[:MAX_LINES]]
    if len(said) > MAX_LINES:
        lines.append(f"... and {len(said) - MAX_LINES} more lines")
    return Block(caption, tuple(lines))


def _columns(said: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The columns that can be read; another version may have written them differently."""
    for one in said if isinstance(said, (list, tuple)) else ():
        if isinstance(one, dict) and isinstance(one.get("frames"), (list, tuple)):
            title = " ".join(
                filter(None, (str(one.get("ranks", "")), f"({one['activity']})" if one.get("activity") else ""))
            )
            yield printable(title), tuple(_line(frame) for frame in one["frames"][:MAX_LINES])


def _side_by_side(block: Block) -> str:
    """Columns side by side; lines that all have in common are drawn faint."""
    stacks = [lines for _, lines in block.columns]
    num_common = next(
        (place for place, frames in enumerate(zip(*stacks, strict=False)) if len(set(frames)) > 1),
        min(map(len, stacks)),
    )
    parts = []
    for title, lines in block.columns:
        common, own = (html.escape("\n".join(part)) for part in (lines[:num_common], lines[num_common:]))
        shared = f'<span class="common">{common}\n</span>' if common else ""
        parts.append(f'<div><h4>{html.escape(title)}</h4><pre tabindex="0">{shared}{own}</pre></div>')
    return f'<div class="columns">{"".join(parts)}</div>'


def _line(entry: object) -> str:
    """One line, whatever it was; its leading spaces are its place."""
    text = "  ".join(f"{key} {value}" for key, value in entry.items()) if isinstance(entry, dict) else str(entry)
    return printable(text.replace("\n", " ").replace("\t", " ").replace("\r", " "))


def _folded(line: str, width: int) -> Iterator[str]:
    width = max(width, MIN_WIDTH)
    tree = TREE.match(line)
    trunk = (tree.group() if tree else "").translate(BRANCHES) + "    "
    if len(trunk) > width // 2:
        trunk = "    "
    while len(line) > width:
        at = line.rfind(" ", len(trunk) + 1, width + 1)
        at = at if at > width // 2 else width
        yield line[:at]
        line = trunk + line[at:].lstrip()
    yield line


STYLE = """
.block { margin: .8rem 0 1.2rem; }
.block figcaption { margin-bottom: .3rem; font-weight: 400; }
.block pre { margin: 0; padding: .7rem .9rem; overflow-x: auto; white-space: pre; overflow-wrap: normal; tab-size: 4;
             color: var(--ink); background: color-mix(in srgb, var(--ink) 5%, var(--paper)); border: 1px solid var(--line);
             border-radius: .4rem; font: .8rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.block .columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: .8rem; margin-bottom: .6rem; }
.block .columns div { min-width: 0; } .block h4 { margin: .2rem 0; font-size: .9rem; } .block .common { color: var(--faint); }
@media print { .block pre { white-space: pre-wrap; overflow-wrap: anywhere; } }
""".strip()
