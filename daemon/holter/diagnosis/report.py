"""A diagnosis for people: a line, a terminal, Markdown, one HTML file.

All say the same in the same order: what is wrong and where, what to do now, why we think so, what it looked like, what speaks
against it, what else it could be. Pure: text in, text out; the clock was read by whoever made the diagnosis.
"""

import html
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from holter.diagnosis import blocks, drawing, plots
from holter.diagnosis.blocks import Block, printable
from holter.records import Cause, Diagnosis, Evidence

MAX_NAMES = 12
"""Tensors and ranks listed before the rest is counted; the JSON has all."""
COLORS = {"critical": "\x1b[1;31m", "warning": "\x1b[1;33m", "info": "\x1b[1;36m"}
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, before any format."""

    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    plots: tuple[Evidence, ...] = ()
    blocks: tuple[Block, ...] = ()


def sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """In the order in which a person wants to know."""
    cause, *others = diagnosis.causes
    if diagnosis.closed_at:
        over = f"Closed {diagnosis.closed_at}: it passed, or the run was started again. What follows is how it was."
        yield Section("It is over", paragraphs=(over,))
    doubts = _of_kind(cause, "strikes")
    if doubts:
        yield Section("Seen before", paragraphs=doubts)
    yield Section("Where", pairs=tuple(_scope(diagnosis, cause)))
    yield Section("What to do", paragraphs=(cause.fix.do,))
    yield Section("Why we think so", items=_proofs(cause))
    if shown := tuple(block for evidence in cause.evidence if (block := blocks.block(evidence)) is not None):
        yield Section("What the ranks were doing", blocks=shown)
    if drawn := tuple(evidence for evidence in cause.evidence if evidence.kind == plots.KIND):
        yield Section("What it looked like", plots=drawn)
    if gaps := _of_kind(cause, "missing"):
        yield Section("Missing evidence", items=gaps)
    if brought := _of_kind(cause, "consequence"):
        yield Section("What it brought about", items=brought)
    yield Section("How it comes about", paragraphs=(cause.mechanism,))
    yield Section("What would refute it", paragraphs=(cause.would_refute,))
    yield Section("About the fix", pairs=_fix(cause))
    if others:
        yield Section("What else it could be", items=tuple(_alternative(other) for other in others))
    yield Section(
        "What holter did",
        paragraphs=(f"{diagnosis.action.directive}: {diagnosis.action.reason}.",),
        pairs=tuple(_record(diagnosis)),
    )


def _of_kind(cause: Cause, kind: str) -> tuple[str, ...]:
    return tuple(_sentence(evidence.summary) for evidence in cause.evidence if evidence.kind == kind)


def _proofs(cause: Cause) -> tuple[str, ...]:
    def is_proof(evidence: Evidence) -> bool:
        return evidence.kind not in {"missing", "consequence", "strikes", plots.KIND, blocks.LAST_COLLECTIVES}

    return tuple(_sentence(evidence.summary) for evidence in cause.evidence if is_proof(evidence))


def _scope(diagnosis: Diagnosis, cause: Cause) -> Iterator[tuple[str, str]]:
    if cause.ranks:
        yield "Ranks", ", ".join(shortened(tuple(map(str, cause.ranks))))
    if diagnosis.first_step >= 0:
        yield "Since step", str(diagnosis.first_step)
    if cause.modules:
        yield "Modules", ", ".join(shortened(cause.modules))
    if cause.tensors:
        yield "Tensors", ", ".join(shortened(cause.tensors))
    if cause.collective:
        yield "Collective", f"{cause.collective.operation} #{cause.collective.sequence} of {cause.collective.group}"
    yield "Confidence", f"{cause.confidence:.2f}, by {cause.basis}"


def _fix(cause: Cause) -> tuple[tuple[str, str], ...]:
    fix = cause.fix
    return (
        ("It changes", fix.changes),
        ("Does not fix", fix.does_not_fix),
        ("Expect", fix.expect),
        ("Verify", fix.verify),
        ("Otherwise", fix.otherwise),
    )


def _alternative(cause: Cause) -> str:
    gap = next((evidence.summary for evidence in reversed(cause.evidence) if evidence.kind == "missing"), "")
    text = (
        f"{cause.cause} ({cause.confidence:.2f}, by {cause.basis}). It would be refuted by this: {cause.would_refute}"
    )
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
    yield "Opened", f"{diagnosis.opened_at}, {diagnosis.detected_after_s:.1f} s after it happened"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`rank 1`, `ranks 0, 3`, with the rest of very many counted."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shortened(tuple(map(str, ranks))))


def shortened(names: tuple[str, ...]) -> list[str]:
    """The first few, and how many more there are."""
    more = len(names) - MAX_NAMES
    return [*names[:MAX_NAMES], f"and {more} more"] if more > 0 else list(names)


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def headline(diagnosis: Diagnosis) -> str:
    """One line: `critical: nonfinite_input on rank 1 at step 30 (confidence 0.93)`."""
    cause = diagnosis.causes[0]
    on = f" on {ranks_text(cause.ranks)}" if cause.ranks else ""
    at = f" at step {diagnosis.first_step}" if diagnosis.first_step >= 0 else ""
    return f"{diagnosis.severity}: {cause.cause}{on}{at} (confidence {cause.confidence:.2f})"


def to_text(diagnosis: Diagnosis, width: int = 100, *, color: bool = False) -> str:
    """For the terminal; no control codes unless `color`."""
    lines = [
        _paint(headline(diagnosis), COLORS[diagnosis.severity], color=color),
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
            lines += [*_wrap(plot.summary, width, "  - ", "    "), f"    {drawing.sparkline(plot, width // 2)}"]
        for block in section.blocks:
            lines += [*_wrap(block.caption, width, "  - ", "    "), *blocks.to_text(block, width, "    ")]
        lines.append("")
    return "\n".join(lines)


def to_markdown(diagnosis: Diagnosis) -> str:
    """For the run directory and for a ticket."""
    lines = [f"# {_md(headline(diagnosis))}", "", _md(diagnosis.symptom), ""]
    for section in sections(diagnosis):
        lines += [f"## {section.title}", ""]
        for paragraph in section.paragraphs:
            lines += [_md(paragraph), ""]
        lines += [f"- {_md(item)}" for item in section.items]
        lines += [f"- **{label}**: {_md(text)}" for label, text in section.pairs]
        lines += [f"- {_md(plot.summary)} `{drawing.sparkline(plot)}`" for plot in section.plots]
        if section.items or section.pairs or section.plots:
            lines.append("")
        for block in section.blocks:
            lines += [_md(block.caption), "", *blocks.to_markdown(block), ""]
    return "\n".join(lines)


def to_html(diagnosis: Diagnosis) -> str:
    """One self-contained file: no script, nothing fetched, light or dark as the reader's system is."""
    title = _html(headline(diagnosis))
    body = "\n".join(_html_section(section) for section in sections(diagnosis))
    return _HTML.format(
        title=title,
        severity=_html(diagnosis.severity),
        symptom=_html(diagnosis.symptom),
        style=f"{_STYLE}\n{drawing.STYLE}\n{blocks.STYLE}",
        body=body,
    )


def to_fragment(diagnosis: Diagnosis) -> str:
    """The same as a piece of another page, which has the styles: no style and no script in it."""
    title, symptom = _html(headline(diagnosis)), _html(diagnosis.symptom)
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


def _paint(text: str, code: str, *, color: bool) -> str:
    return f"{code}{printable(text)}{PLAIN}" if color else printable(text)


def _md(text: str) -> str:
    """Names are literal: `layers.*` is no emphasis, `<x>` no tag and `[x](y)` no link."""
    literal = "".join(f"\\{char}" if char in "\\*<" else char for char in printable(" ".join(text.split())))
    return literal.replace("](", "\\](")


def _html(text: str) -> str:
    return html.escape(printable(text))


def _html_section(section: Section, level: int = 2) -> str:
    parts = [f"<section><h{level}>{_html(section.title)}</h{level}>"]
    parts += [f"<p>{_html(paragraph)}</p>" for paragraph in section.paragraphs]
    if section.items:
        parts.append("<ul>" + "".join(f"<li>{_html(item)}</li>" for item in section.items) + "</ul>")
    if section.pairs:
        rows = "".join(f"<dt>{_html(label)}</dt><dd>{_html(text)}</dd>" for label, text in section.pairs)
        parts.append(f"<dl>{rows}</dl>")
    parts += [drawing.figure(plot, number) for number, plot in enumerate(section.plots)]
    parts += [blocks.to_html(block) for block in section.blocks]
    return "".join([*parts, "</section>"])


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

FRAGMENT_STYLE = f"{drawing.STYLE}\n{blocks.STYLE}\n"
"""What a page needs that shows fragments, beside its own `--ink`, `--paper`, `--faint` and `--line`."""

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
