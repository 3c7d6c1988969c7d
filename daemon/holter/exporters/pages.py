"""The pages that `holter explain NAME` prints, which are also the runbooks behind the alerts.

A detector's page is its module's docstring; a cause's page is its entry in the catalogue; the page of an alert about
holter itself is its rule.
"""

import dataclasses
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, cast

from holter.exporters.alerts import WATCHER_RULES, WatcherRule
from holter.faults import CAUSES, DETECTORS, FAMILIES
from holter.faults.family import CauseEntry, DetectorEntry
from holter.records.titles import title

WIDTH = 100
FIX_PARTS = {
    "do": "Do",
    "changes": "What that changes",
    "does_not_fix": "What it does not fix",
    "expect": "What to expect",
    "verify": "How to verify",
    "otherwise": "If it does not help",
}
ON_TRIAL = "It was tried on made-up windows only, never on a real job: it reports, and halts nothing."
INDENT = "    "
EXPRESSION = "## Fires on"
_SETTING = re.compile(r"    \w+\.\w+ = ")


def names() -> tuple[str, ...]:
    """Return the names of everything that has a page: detectors, causes, then alerts about holter itself."""
    return tuple(dict.fromkeys((*DETECTORS, *CAUSES, *(watch.name for watch in WATCHER_RULES))))


def overview() -> Iterator[str]:
    """Yield one line for each page, by family of faults: causes, then detectors; alerts about holter itself come last."""
    width = max(map(len, names()))
    for family in FAMILIES:
        yield f"{type(family.detectors[0].detector).__module__.split('.')[-2]}"
        for cause in family.causes:
            yield f"  {cause.cause:<{width}}  {cause.happened.partition('. ')[0]}"
        for entry in family.detectors:
            if entry.detector.name not in CAUSES:
                first = (sys.modules[type(entry.detector).__module__].__doc__ or "").strip().splitlines()[0]
                yield f"  {entry.detector.name:<{width}}  {first} (detector)"
        yield ""
    yield "holter itself"
    for watch in WATCHER_RULES:
        yield f"  {watch.name:<{width}}  {watch.happened}"


def page(name: str) -> str | None:
    """Return what `holter explain NAME` prints; None if there is no such page.

    If a name is both a detector's and a cause's, it has both pages.
    """
    for watch in WATCHER_RULES:
        if watch.name == name:
            return _watcher_page(watch)
    found = [_detector_page(DETECTORS[name])] if name in DETECTORS else []
    found += [_cause_page(CAUSES[name])] if name in CAUSES else []
    return "\n".join(found) or None


def runbook_files() -> dict[str, str]:
    """Return Markdown by file name; `grafana/runbooks` and the pages of the documentation are generated from this alone."""
    return {f"{name}.md": _to_markdown(page(name) or "") for name in names()}


def _detector_page(entry: DetectorEntry) -> str:
    detector = entry.detector
    text = (sys.modules[type(detector).__module__].__doc__ or "").strip()
    causes = [cause.cause for cause in CAUSES.values() if any(row.detector == detector.name for row in cause.rows)]
    fields = (field.name for field in dataclasses.fields(cast("Any", detector)))
    settings = [f"    {detector.name}.{name} = {getattr(detector, name)}" for name in fields]
    on_trial = ["On trial", _indented(ON_TRIAL), ""] if entry.tried_on != "jobs" else []
    led_to = ["Causes it can lead to", _indented(", ".join(causes)), ""]
    return "\n".join([f"{detector.name} (detector)", "", text, "", *on_trial, *led_to, "Settings", *settings, ""])


def _cause_page(entry: CauseEntry) -> str:
    sections = (
        ("What happened", entry.happened),
        ("How it comes about", entry.mechanism),
        ("What would refute it", entry.would_refute),
        *((heading, getattr(entry.fix, key)) for key, heading in FIX_PARTS.items()),
        ("Seen by", ", ".join(dict.fromkeys(row.detector for row in entry.rows))),
    )
    return _of_sections(f"{entry.cause} (cause): {title(entry.cause)}", sections)


def _watcher_page(watch: WatcherRule) -> str:
    sections = (
        ("What happened", watch.happened),
        ("Why it matters", watch.why),
        ("When it stays quiet", watch.quiet),
        ("Do", watch.do),
        ("Fires on", watch.expr),
    )
    return _of_sections(f"{watch.name} (alert)", sections)


def _of_sections(title: str, sections: Iterable[tuple[str, str]]) -> str:
    return "\n".join([title, "", *(f"{heading}\n{_indented(text)}\n" for heading, text in sections)])


def _indented(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
    )


def _to_markdown(page: str) -> str:
    """Convert a page to Markdown.

    A line before an indented one becomes a title, settings become a list, and an alert's expression, its last section,
    stays indented as code.
    """
    lines = page.rstrip().splitlines()
    out: list[str] = []
    for line, following in pairwise([*lines, ""]):
        is_title = not line.startswith(INDENT) and following.startswith(INDENT)
        if line.endswith((" (detector)", " (cause)", " (alert)")) and not line.startswith(INDENT):
            out.append(f"# {line}")
        elif is_title:
            out += [f"## {line}", ""]
        elif EXPRESSION not in out and _SETTING.match(line):
            out.append(f"- `{line.removeprefix(INDENT)}`")
        else:
            out.append(line if EXPRESSION in out else line.removeprefix(INDENT))
    return "\n".join(out) + "\n"
