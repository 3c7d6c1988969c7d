"""Write a diagnosis for people: as a line, for a terminal, as Markdown, or as one HTML file.

All formats say the same in the same order: what is wrong and where, what to do now, why we think so, what it looked
like, what speaks against it, and what else it could be. Pure: text in, text out; the clock was read by whoever made the
diagnosis.

Evidence that is read in columns, such as stacks and last collectives, is shown as blocks of fixed-width text. Its
content was written by ranks: no line may move the cursor, end its fence or become a tag.
"""

import html
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from holter.diagnosis import plots
from holter.records import Cause, Diagnosis, Evidence, Fix, Hypothesis
from holter.records.titles import titled

MAX_NAMES = 12
"""Number of tensors and ranks listed before the rest is only counted; the JSON has all."""
COLORS = {"critical": "\x1b[1;31m", "warning": "\x1b[1;33m", "info": "\x1b[1;36m"}
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
STACKS, LAST_COLLECTIVES = "stacks", "last_collectives"
MAX_BLOCK_LINES = 200
"""Largest number of lines of a block of stacks or calls; the JSON has all."""
BRANCHES = str.maketrans({"├": "│", "└": " ", "─": " "})
MIN_WIDTH = 24
"""Smallest width in characters to which lines are folded."""
TREE = re.compile(r"[ │├└─]*")


@dataclass(frozen=True)
class Block:
    """Fixed-width lines with a caption."""

    caption: str
    lines: tuple[str, ...]
    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The same content in columns, for formats with room to show them side by side: (title, lines)."""


@dataclass(frozen=True)
class Section:
    """A heading with its content, independent of any format."""

    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    plots: tuple[Evidence, ...] = ()
    blocks: tuple[Block, ...] = ()


def sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """Yield the sections of a report in the order in which a reader needs them."""
    cause = diagnosis.causes[0]
    if diagnosis.closed_at:
        over = f"Closed {diagnosis.closed_at}: it passed, or the run was started again. What follows is how it was."
        yield Section("It is over", paragraphs=(over,))
    if doubts := _of_kind(cause, "strikes"):
        yield Section("Stop and think", paragraphs=doubts)
    if diagnosis.seen_before:
        yield Section("Seen before", items=diagnosis.seen_before)
    yield Section("Where", pairs=tuple(_scope(diagnosis, cause)))
    yield Section("What to do", paragraphs=(cause.fix.do,))
    yield Section("Why we think so", items=_proofs(cause))
    if shown := tuple(block for evidence in cause.evidence if (block := block_of(evidence)) is not None):
        yield Section("What the ranks were doing", blocks=shown)
    if drawn := tuple(evidence for evidence in cause.evidence if evidence.kind == plots.KIND):
        yield Section("What it looked like", plots=drawn)
    if gaps := _of_kind(cause, "missing"):
        yield Section("Missing evidence", items=gaps)
    if brought := _of_kind(cause, "consequence"):
        yield Section("What it brought about", items=brought)
    yield Section("How it comes about", paragraphs=(cause.mechanism,))
    yield Section("What would refute it", paragraphs=(cause.would_refute,))
    yield Section("About the fix", pairs=_fix(cause.fix))
    yield from _others(diagnosis, cause)
    yield Section(
        "What holter did",
        paragraphs=(f"{diagnosis.action.directive}: {diagnosis.action.reason}.",),
        pairs=tuple(_record(diagnosis)),
    )


def _others(diagnosis: Diagnosis, cause: Cause) -> Iterator[Section]:
    """Yield the sources that the first cause rests on, and the other causes."""
    if cause.sources:
        yield Section("What this pattern rests on", items=cause.sources)
    if diagnosis.hypotheses:
        title = "What else it could be, in the order to test, one change at a time"
        yield Section(title, items=tuple(map(_hypothesis, diagnosis.hypotheses)))
    elif len(diagnosis.causes) > 1:
        yield Section("What else it could be", items=tuple(map(_alternative, diagnosis.causes[1:])))


def _of_kind(cause: Cause, kind: str) -> tuple[str, ...]:
    return tuple(_sentence(evidence.summary) for evidence in cause.evidence if evidence.kind == kind)


def _proofs(cause: Cause) -> tuple[str, ...]:
    no_proofs = {"missing", "consequence", "strikes", plots.KIND, LAST_COLLECTIVES}
    return tuple(_sentence(evidence.summary) for evidence in cause.evidence if evidence.kind not in no_proofs)


def _scope(diagnosis: Diagnosis, cause: Cause) -> Iterator[tuple[str, str]]:
    if cause.ranks:
        yield "Ranks", _listed(tuple(map(str, cause.ranks)))
    if diagnosis.first_step >= 0:
        yield "Since step", str(diagnosis.first_step)
    if cause.modules:
        yield "Modules", _listed(cause.modules)
    if cause.tensors:
        yield "Tensors", _listed(cause.tensors)
    if cause.collective:
        yield "Collective", f"{cause.collective.operation} #{cause.collective.sequence} of {cause.collective.group}"
    yield "Confidence", f"{cause.confidence:.2f}, by {cause.basis}"


def _fix(fix: Fix) -> tuple[tuple[str, str], ...]:
    return (
        ("It changes", fix.changes),
        ("Does not fix", fix.does_not_fix),
        ("Expect", fix.expect),
        ("Verify", fix.verify),
        ("Otherwise", fix.otherwise),
        *(
            (label, text)
            for label, text in (
                *(("Or", one) for one in fix.alternatives),
                ("Prevent", fix.prevent),
                ("Roll back", fix.roll_back),
            )
            if text
        ),
    )


def _hypothesis(one: Hypothesis) -> str:
    return f"{titled(one.cause)}, {one.confidence:.2f}. Confirmed by: {_sentence(one.confirm)} Ruled out by: {_sentence(one.rule_out)} {one.looked_at}"


def _alternative(cause: Cause) -> str:
    gap = next((evidence.summary for evidence in reversed(cause.evidence) if evidence.kind == "missing"), "")
    text = f"{titled(cause.cause)}, {cause.confidence:.2f}, by {cause.basis}. It would be refuted by this: {cause.would_refute}"
    return f"{text} Missing: {gap}." if gap and cause.confidence < 0.70 else text  # noqa: PLR2004 - the public bound of INTERFACE


def _record(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    if diagnosis.action.checkpoint:
        yield "Checkpoint", diagnosis.action.checkpoint
    if healthy := diagnosis.action.last_healthy:
        yield "Last healthy", f"checkpoint of step {healthy.step}: {healthy.path}"
    if diagnosis.action.exit_code is not None:
        yield (
            "To go on",
            "deal with the cause, then `holter resume RUN`: it says how to load what was kept, and lets the run start",
        )
    yield "Incident", f"{diagnosis.id} of run {diagnosis.run_id}"
    after_s = diagnosis.detected_after_s
    since = f", {after_s:.1f} s after it began" if after_s is not None else "; when it began was not seen"
    yield "Opened", f"{diagnosis.opened_at}{since}"


def _listed(names: tuple[str, ...]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - MAX_NAMES
    return ", ".join([*names[:MAX_NAMES], f"and {more} more"] if more > 0 else names)


def _sentence(text: str) -> str:
    # Files, tensors and settings are written as they are.
    is_name = any(letter in "/._`" for letter in text.partition(" ")[0].rstrip(".:,"))
    text = text if is_name else text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def headline(diagnosis: Diagnosis) -> str:
    """Return the headline: `critical: Non-finite input (nonfinite_input) on rank 1 at step 30 (confidence 0.93)`."""
    cause = diagnosis.causes[0]
    who = "rank" if len(cause.ranks) == 1 else "ranks"
    on = f" on {who} {_listed(tuple(map(str, cause.ranks)))}" if cause.ranks else ""
    at = f" at step {diagnosis.first_step}" if diagnosis.first_step >= 0 else ""
    return f"{diagnosis.severity}: {titled(cause.cause)}{on}{at} (confidence {cause.confidence:.2f})"


def to_text(diagnosis: Diagnosis, width: int = 100, *, color: bool = False) -> str:
    """Write a diagnosis for the terminal; without control codes unless `color`."""
    lines = [
        *(_paint(line, COLORS[diagnosis.severity], color=color) for line in _wrap(headline(diagnosis), width)),
        "",
        *_wrap(diagnosis.symptom, width),
        "",
    ]
    for section in sections(diagnosis):
        lines.append(_paint(section.title, BOLD, color=color))
        for paragraph in section.paragraphs:
            lines += _wrap(paragraph, width, "  ")
        for item in section.items:
            lines += _wrap(item, width, "  - ", "    ")
        label_width = max((len(label) for label, _ in section.pairs), default=0) + 2
        for label, text in section.pairs:
            lines += _wrap(text, width, f"  {label:<{label_width}}", " " * (label_width + 2))
        for plot in section.plots:
            lines += [*_wrap(plot.summary, width, "  - ", "    "), f"    {plots.sparkline(plot, width // 2)}"]
        for block in section.blocks:
            lines += [*_wrap(block.caption, width, "  - ", "    "), *block_to_text(block, width, "    ")]
        lines.append("")
    return "\n".join(lines)


def to_markdown(diagnosis: Diagnosis) -> str:
    """Write a diagnosis as Markdown, for the run directory or a ticket."""
    lines = [f"# {_md(headline(diagnosis))}", "", _md(diagnosis.symptom), ""]
    for section in sections(diagnosis):
        lines += [f"## {section.title}", ""]
        for paragraph in section.paragraphs:
            lines += [_md(paragraph), ""]
        lines += [f"- {_md(item)}" for item in section.items]
        lines += [f"- **{label}**: {_md(text)}" for label, text in section.pairs]
        lines += [f"- {_md(plot.summary)} `{plots.sparkline(plot)}`" for plot in section.plots]
        if section.items or section.pairs or section.plots:
            lines.append("")
        for block in section.blocks:
            lines += [_md(block.caption), "", *block_to_markdown(block), ""]
    return "\n".join(lines)


def to_html(diagnosis: Diagnosis, *others: Diagnosis) -> str:
    """Write diagnoses as one self-contained HTML file, below one another.

    It has no scripts and fetches nothing; it is light or dark as the reader's system is.
    """
    return _HTML.format(
        title=_html(headline(diagnosis)),
        severity=_html(diagnosis.severity),
        symptom=_worded(diagnosis.symptom),
        style=f"{_STYLE}\n{plots.STYLE}\n{_BLOCK_STYLE}",
        body="\n".join(
            [
                *(_html_section(section) for section in sections(diagnosis)),
                *(f"<hr>\n{to_fragment(one)}" for one in others),
            ]
        ),
    )


def to_fragment(diagnosis: Diagnosis) -> str:
    """Write a diagnosis as a piece of another HTML page; that page must hold the styles."""
    title, symptom = _html(headline(diagnosis)), _worded(diagnosis.symptom)
    body = "\n".join(_html_section(section, 3) for section in sections(diagnosis))
    return f'<h2 class="{_html(diagnosis.severity)}">{title}</h2>\n<p class="symptom">{symptom}</p>\n{body}'


def _wrap(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    rest = first if rest is None else rest
    wrapped = textwrap.wrap(
        printable(text),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped or [first.rstrip()]


def printable(text: str) -> str:
    """Replace control characters, because names come from the training script and must not move the cursor."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _paint(text: str, code: str, *, color: bool) -> str:
    return f"{code}{printable(text)}{PLAIN}" if color else printable(text)


def _md(text: str) -> str:
    """Escape Markdown: in names, `layers.*` is no emphasis, `<x>` no tag and `[x](y)` no link."""
    literal = "".join(f"\\{char}" if char in "\\*<" else char for char in printable(" ".join(text.split())))
    return literal.replace("](", "\\](")


def _html(text: str) -> str:
    return html.escape(printable(text))


def _worded(text: str) -> str:
    """Escape a text, and show what stands between backticks as code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", _html(text))


def _html_section(section: Section, level: int = 2) -> str:
    parts = [f"<section><h{level}>{_html(section.title)}</h{level}>"]
    parts += [f"<p>{_worded(paragraph)}</p>" for paragraph in section.paragraphs]
    if section.items:
        parts.append("<ul>" + "".join(f"<li>{_worded(item)}</li>" for item in section.items) + "</ul>")
    if section.pairs:
        rows = "".join(f"<dt>{_html(label)}</dt><dd>{_worded(text)}</dd>" for label, text in section.pairs)
        parts.append(f"<dl>{rows}</dl>")
    parts += [plots.figure(plot, number) for number, plot in enumerate(section.plots)]
    parts += [block_to_html(block) for block in section.blocks]
    return "".join([*parts, "</section>"])


def block_of(evidence: Evidence) -> Block | None:
    """Return the fixed-width block that a piece of evidence carries; None if it carries none."""
    if evidence.kind == STACKS:
        made = _made("Stacks of the ranks' main threads, the outermost frame first:", evidence.values, "tree")
        return made and replace(made, columns=tuple(_columns(evidence.values.get("columns"))))
    if evidence.kind == LAST_COLLECTIVES:
        return _made(f"{evidence.summary[:1].upper()}{evidence.summary[1:]}:", evidence.values, "calls")
    return None


def block_to_text(block: Block, width: int, indent: str) -> list[str]:
    """Write a block for the terminal; a line that is too wide continues below, within its branch of the tree."""
    return [f"{indent}{part}".rstrip() for line in block.lines for part in _folded(line, width - len(indent))]


def block_to_markdown(block: Block) -> list[str]:
    """Write a block as fenced Markdown, with a fence that no line can end."""
    longest = max((len(run) for line in block.lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *block.lines, fence]


def block_to_html(block: Block) -> str:
    """Write a block as an HTML figure that scrolls by itself."""
    caption, text = html.escape(block.caption), html.escape("\n".join(block.lines))
    tree = f'<pre tabindex="0">{text}</pre>'
    if len(block.columns) > 1:
        tree = f"{_side_by_side(block)}<details><summary>As one tree</summary>{tree}</details>"
    return f'<figure class="block"><figcaption>{caption}</figcaption>{tree}</figure>'


def _made(caption: str, values: Mapping[str, object], key: str) -> Block | None:
    said = values.get(key)
    if not isinstance(said, (list, tuple)) or not said:
        return None
    lines = [_line(entry) for entry in said[:MAX_BLOCK_LINES]]
    if len(said) > MAX_BLOCK_LINES:
        lines.append(f"... and {len(said) - MAX_BLOCK_LINES} more lines")
    return Block(caption, tuple(lines))


def _columns(said: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (title, lines) of each column that can be read; another version may have written them differently."""
    for one in said if isinstance(said, (list, tuple)) else ():
        if isinstance(one, dict) and isinstance(one.get("frames"), (list, tuple)):
            activity = f"({one['activity']})" if one.get("activity") else ""
            title = " ".join(filter(None, (str(one.get("ranks", "")), activity)))
            yield printable(title), tuple(_line(frame) for frame in one["frames"][:MAX_BLOCK_LINES])


def _side_by_side(block: Block) -> str:
    """Write the columns side by side; lines that all of them share are drawn faint."""
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
    """Format one entry as a line; leading spaces are kept, because they show its place."""
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


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #59636e; --line: #d1d9e0; --bar: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #9198a1; --line: #3d444d; --bar: #4493f8; } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 46rem; background: var(--paper); color: var(--ink);
       font: 1.05rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; line-height: 1.3; padding: .2rem 0 .2rem .8rem; border-left: .4rem solid var(--bar); }
.critical { --bar: #cf222e; } .warning { --bar: #bf8700; }
.symptom { font-size: 1.15rem; }
h2 { font-size: 1rem; margin: 1.8rem 0 .4rem; border-bottom: 1px solid var(--line); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; }
dt { color: var(--faint); } dd { margin: 0; }
li { margin: .3rem 0; }
@media (max-width: 32rem) { dl { grid-template-columns: 1fr; } }
""".strip()

_BLOCK_STYLE = """
.block { margin: .8rem 0 1.2rem; }
.block figcaption { margin-bottom: .3rem; font-weight: 400; }
.block pre { margin: 0; padding: .7rem .9rem; overflow-x: auto; white-space: pre; overflow-wrap: normal; tab-size: 4;
             color: var(--ink); background: color-mix(in srgb, var(--ink) 5%, var(--paper)); border: 1px solid var(--line);
             border-radius: .4rem; font: .8rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.block .columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: .8rem; margin-bottom: .6rem; }
.block .columns div { min-width: 0; } .block h4 { margin: .2rem 0; font-size: .9rem; } .block .common { color: var(--faint); }
@media print { .block pre { white-space: pre-wrap; overflow-wrap: anywhere; } }
""".strip()

FRAGMENT_STYLE = f"{plots.STYLE}\n{_BLOCK_STYLE}\n"
"""CSS for a page that shows fragments; it uses the page's own `--ink`, `--paper`, `--faint` and `--line`."""

_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body class="{severity}">
<h1>{title}</h1>
<p class="symptom">{symptom}</p>
{body}
</body>
</html>
"""
