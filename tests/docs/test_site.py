"""The site builds strictly, every link in it and in the files of the root leads somewhere, and it shows what the code says."""

import html
import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from holter.config import Settings
from holter.exporters import pages

ROOT = Path(__file__).resolve().parents[2]
READ_IN_THE_REPOSITORY = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "daemon/README.md",
    "grafana/README.md",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed (`make install`)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def text(path: Path) -> str:
    """What a reader sees."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", path.read_text(encoding="utf-8"))).split())


def test_every_page_that_explain_prints_is_there_with_its_words(site: Path) -> None:
    for name in pages.names():
        shown = text(site / "explain" / f"{name}.html")
        for block in (pages.page(name) or "").replace("`", "").split("\n\n"):
            body = "\n".join(line for line in block.splitlines() if line.startswith("    "))
            assert " ".join(body.split()) in shown, name


def test_every_cause_and_every_detector_is_listed(site: Path) -> None:
    listed = "".join((site / f"{page}.html").read_text() for page in ("causes", "detectors", "alerts"))
    assert [] == [name for name in pages.names() if f'href="explain/{name}.html"' not in listed]


def test_every_setting_has_its_row(site: Path) -> None:
    shown = (site / "settings.html").read_text()
    assert [] == [field.name for field in fields(Settings) if f"<code>HOLTER_{field.name.upper()}</code>" not in shown]


def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    loads = re.compile(r"""(?:src|<link[^>]+href)=["']?((?:https?:)?//[^"'> ]+)""")
    found = {address for page in site.rglob("*.html") for address in loads.findall(page.read_text(encoding="utf-8"))}
    assert set() == found


def anchors(path: Path) -> set[str]:
    """As Markdown makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", READ_IN_THE_REPOSITORY)
def test_links_of_files_that_are_read_in_the_repository_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not link.startswith(("http:", "https:")):
            place, _, anchor = link.partition("#")
            target = path.parent / place if place else path
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
