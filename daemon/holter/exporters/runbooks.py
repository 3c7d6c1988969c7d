"""Pages as Markdown, for whoever follows a `runbook_url`; and the pages of alerts about holter itself."""

import re
from itertools import pairwise

from holter.diagnosis.pages import indented
from holter.exporters.watcher_rules import WatcherRule

INDENT = "    "
EXPRESSION = "## Fires on"
_SETTING = re.compile(r"    \w+\.\w+ = ")


def watch_page(watch: WatcherRule) -> str:
    """As the page of a cause."""
    sections = (
        ("What happened", watch.happened),
        ("Why it matters", watch.why),
        ("When it stays quiet", watch.quiet),
        ("Do", watch.do),
        ("Fires on", watch.expr),
    )
    return "\n".join(
        [f"{watch.name} (alert)", "", *("\n".join([title, indented(text), ""]) for title, text in sections)]
    )


def to_markdown(page: str) -> str:
    """A title is a line before an indented one; settings are a list; an alert's expression, its last section, stays indented, as code."""
    lines = page.rstrip().splitlines()
    out: list[str] = []
    for line, following in pairwise([*lines, ""]):
        is_title = not line.startswith(INDENT) and following.startswith(INDENT)
        if line.endswith((" (detector)", " (cause)", " (alert)")) and not line.startswith(INDENT):
            out.append(f"# {line}")
        elif is_title:
            out += [f"## {line}", ""]
        else:
            out.append(line if EXPRESSION in out else _body(line))
    return "\n".join(out) + "\n"


def _body(line: str) -> str:
    text = line.removeprefix(INDENT)
    return f"- `{text}`" if _SETTING.match(line) else text
