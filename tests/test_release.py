"""`make release`: the bill of materials is of what is installed at run time, and nothing else comes in than what is written down."""

import hashlib
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.release, pytest.mark.slow]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a copy of the tree, so that the tree's own dist/ is left alone."""
    if missing := [
        name for name in ("auditwheel", "build", "cyclonedx_py", "pip_audit", "twine") if find_spec(name) is None
    ]:
        pytest.skip(f"not installed: {', '.join(missing)}; `make release` installs them")
    copy = tmp_path_factory.mktemp("release") / "holter"
    leave_out = shutil.ignore_patterns(
        ".venv", ".git", "dist", "build", "site", "holter-runs", "*.egg-info", "node_modules"
    )
    shutil.copytree(ROOT, copy, ignore=leave_out, symlinks=True)
    command = [sys.executable, str(copy / "deploy" / "release" / "make_release.py"), "--unaudited"]
    subprocess.run(command, cwd=copy, check=True, timeout=280, capture_output=True)
    return copy / "dist"


def test_the_sums_are_of_all_that_is_published(dist: Path) -> None:
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sorted(sums) == sorted(path.name for path in dist.iterdir() if path.name != "SHA256SUMS")
    assert all(hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest for name, digest in sums.items())


def test_the_bill_names_what_is_needed_at_run_time_and_nothing_of_the_tests(dist: Path) -> None:
    bill = json.loads((dist / "holter.cdx.json").read_text())
    named = {component["name"].lower().replace("_", "-") for component in bill["components"]}
    assert {"aiohttp", "msgspec", "prometheus-client", "py-spy"} <= named
    assert not named & {"pytest", "torch", "pip", "pip-audit"}
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in (dist / "requirements.txt").read_text().splitlines()
    }
    assert pinned == named - {"holter"}


def test_every_requirement_has_the_digest_of_its_file(dist: Path) -> None:
    assert all(" --hash=sha256:" in line for line in (dist / "requirements.txt").read_text().splitlines())


def test_the_wheel_can_be_uploaded_and_has_what_is_printed_without_extras(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert "manylinux" in wheel.name
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "clean"], check=True)
    python = tmp_path / "clean" / "bin" / "python"
    into = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*into, "-r", dist / "requirements.txt"], check=True)
    subprocess.run([*into, "--no-deps", wheel], check=True)
    for words in (["dashboards"], ["alerts"], ["explain"], ["completion", "man"]):
        told = subprocess.run(
            [python.with_name("holter"), *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert len(told.stdout) > 10_000, words
