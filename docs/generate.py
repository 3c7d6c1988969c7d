"""What mkdocs does not find as a file: pages made from the code, files of the repository's root, pictures that lie elsewhere.

    explain/NAME.md    the page that `holter explain NAME` prints and `grafana/runbooks` holds
    settings.md        its table, from `config.py`
    causes.md          its tables, from the pages of causes; detectors.md, alerts.md and verdicts.md likewise

mkdocs calls `on_files` and `on_page_markdown` (its hooks); nothing that is made here is committed.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

from holter import config as settings
from holter import faults
from holter.exporters import alerts, pages
from holter.faults.family import DetectorEntry, Family

ROOT = Path(__file__).resolve().parent.parent
FROM_THE_ROOT = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PICTURES = (
    *(ROOT / "deploy/pictures").iterdir(),
    *(ROOT / "grafana/pictures").iterdir(),
    ROOT / "daemon/holter/status_page/static/icon.svg",
)
LINKED_SECTIONS = ("## Seen by", "## Causes it can lead to")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files that are not in `docs/`."""
    for name, text in pages.runbook_files().items():
        file = File.generated(config, f"explain/{name}", content=_with_links(text))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    for name in FROM_THE_ROOT:
        files.append(File.generated(config, name.lower(), content=_moved((ROOT / name).read_text(encoding="utf-8"))))
    for path in PICTURES:
        files.append(File.generated(config, f"pictures/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put each table where its page asks for it."""
    for name, made in TABLES.items():
        marker = f"<!-- generated: {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, "\n".join(made()))
    return markdown


def _moved(text: str) -> str:
    """A file of the root, as a page: links to pages lose `docs/`, those to other files become plain words."""
    text = re.sub(r"\[([^]]+)\]\((?!https?:|#|docs/)[^)]+\)", r"\1", text)
    return text.replace("](docs/", "](")


def _with_links(page: str) -> str:
    """The names in its lists of detectors and causes lead to their pages."""
    lines, title = [], ""
    for line in page.splitlines():
        title = line if line.startswith("#") else title
        is_list = title in LINKED_SECTIONS and line and not line.startswith("#")
        lines.append(re.sub(r"\w+", _link, line) if is_list else line)
    return "\n".join(lines) + "\n"


def _link(name: re.Match[str]) -> str:
    return f"[{name[0]}]({name[0]}.md)" if name[0] in pages.names() else name[0]


def _settings_table() -> Iterator[str]:
    """One row a field of `Settings`; its meaning is the string under it in the source."""
    (body,) = (
        node.body for node in ast.parse(inspect.getsource(settings.Settings)).body if isinstance(node, ast.ClassDef)
    )
    yield from ("| in the environment | in `holter.toml` | default | meaning |", "|---|---|---|---|")
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            name = ast.unparse(field.target)
            meaning = ast.literal_eval(below.value)
            yield f"| `{settings.PREFIX}{name.upper()}` | `{name}` | {_default(name)} | {meaning} |"


def _default(name: str) -> str:
    value = getattr(settings.Settings, name)
    return "" if value in ("", ()) else f"`{value}`"


def _tables(rows: Callable[[Family], Iterable[tuple[str, str]]], head: str) -> Iterator[str]:
    """One table a family, of names and what is said of them; its heading is the docstring of the family's package."""
    for family in faults.FAMILIES:
        (package,) = {type(entry.detector).__module__.rpartition(".")[0] for entry in family.detectors}
        title = (import_module(package).__doc__ or "").partition(".")[0].strip()
        yield from ("", f"## {title}", "", head, "|---|---|")
        yield from (f"| [`{name}`](explain/{name}.md) | {said} |" for name, said in rows(family))


def _causes_table() -> Iterator[str]:
    yield from _tables(
        lambda family: ((entry.cause, entry.happened) for entry in family.causes), "| cause | what happened |"
    )


def _detectors_table() -> Iterator[str]:
    yield from _tables(
        lambda family: ((entry.detector.name, _summary(entry)) for entry in family.detectors),
        "| detector | what it sees |",
    )


def _summary(entry: DetectorEntry) -> str:
    docstring = sys.modules[type(entry.detector).__module__].__doc__ or ""
    note = "" if entry.tried_on == "jobs" else f" *(Tried on {entry.tried_on} only: it reports, and halts nothing.)*"
    return docstring.strip().splitlines()[0] + note


def _alerts_table() -> Iterator[str]:
    yield from ("| page | what happened |", "|---|---|")
    yield from (f"| [`{watch.name}`](explain/{watch.name}.md) | {watch.happened} |" for watch in alerts.WATCHER_RULES)


def _verdicts_table() -> Iterator[str]:
    """One row a cause: the verdict on a checkpoint with it, and from which state on."""
    yield from ("| cause | checkpoint | which states | why |", "|---|---|---|---|")
    for entry in sorted(faults.CAUSES.values(), key=lambda entry: entry.cause):
        name, damage = f"[`{entry.cause}`](explain/{entry.cause}.md)", entry.damage
        if damage is None:
            yield f"| {name} | as it was | | |"
        else:
            states = "from that step on" if damage.begins == "before the step" else "from the next step on"
            yield f"| {name} | {damage.verdict} | {states} | {damage.why} |"


TABLES = {
    "settings": _settings_table,
    "causes": _causes_table,
    "detectors": _detectors_table,
    "alerts": _alerts_table,
    "verdicts": _verdicts_table,
}
