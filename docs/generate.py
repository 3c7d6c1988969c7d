"""What mkdocs does not find as a file: pages made from the code, files of the repository's root, pictures that lie elsewhere.

    explain/NAME.md    the page that `holter explain NAME` prints and `grafana/runbooks` holds
    settings.md        its table, from `config.py`
    causes.md          its tables, from the pages of causes; detectors.md and alerts.md likewise

mkdocs calls `on_files` and `on_page_markdown` (its hooks); nothing that is made here is committed.
"""

import ast
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

from holter import config as settings
from holter import faults
from holter.exporters import alerts

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
    for name, text in alerts.runbook_files().items():
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
    return f"[{name[0]}]({name[0]}.md)" if name[0] in alerts.page_names() else name[0]


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


def _pages(kind: str) -> dict[str, str]:
    """Name -> the page of a cause, a detector or an alert, where a name may have two."""
    found = {}
    for text in alerts.runbook_files().values():
        for page in re.split(r"^(?=# )", text, flags=re.MULTILINE):
            title = re.match(rf"# (\w+) \({kind}\)\n", page)
            if title:
                found[title[1]] = page
    return found


def _section(page: str, title: str) -> str:
    """Its text on one line."""
    found = re.search(rf"^## {title}\n+(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _families() -> dict[str, str]:
    """Detector -> what the docstring of its family's package says."""
    return {
        detector.name: (import_module(type(detector).__module__.rpartition(".")[0]).__doc__ or "").strip()
        for detector in faults.ALL
    }


def _by_family(rows: Iterable[tuple[str, str, str]], head: str) -> Iterator[str]:
    """Tables of (family, name, sentence), a heading a family."""
    families = defaultdict(list)
    for family, name, sentence in rows:
        families[family].append(f"| [`{name}`](explain/{name}.md) | {sentence} |")
    for family, lines in families.items():
        yield from ("", f"## {family.rstrip('.')}", "", head, "|---|---|", *lines)


def _causes_table() -> Iterator[str]:
    families = _families()
    rows = (
        (families[_section(page, "Seen by").split(",")[0]], name, _section(page, "What happened"))
        for name, page in _pages("cause").items()
    )
    yield from _by_family(rows, "| cause | what happened |")


def _detectors_table() -> Iterator[str]:
    rows = ((_families()[name], name, _first_sentence(name)) for name in _pages("detector"))
    yield from _by_family(rows, "| detector | what it sees |")


def _first_sentence(detector: str) -> str:
    (found,) = (one for one in faults.ALL if one.name == detector)
    return (sys.modules[type(found).__module__].__doc__ or "").strip().splitlines()[0]


def _alerts_table() -> Iterator[str]:
    yield from ("| page | what happened |", "|---|---|")
    for name, page in _pages("alert").items():
        yield f"| [`{name}`](explain/{name}.md) | {_section(page, 'What happened')} |"


TABLES = {
    "settings": _settings_table,
    "causes": _causes_table,
    "detectors": _detectors_table,
    "alerts": _alerts_table,
}
