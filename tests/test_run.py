"""The runner forgives what passes by itself, a few at most, and says so."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
RUN = Path(__file__).parent / "run.py"


@pytest.fixture
def run(tmp_path):
    def start(text):
        (tmp_path / "test_it.py").write_text(text)
        return subprocess.run(
            [sys.executable, RUN, "-q", "-p", "no:cacheprovider"],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    return start


FLAKY = """
from pathlib import Path
def test_late():
    seen = Path("seen")
    is_second = seen.exists()
    seen.touch()
    assert is_second
"""


def test_a_test_that_passes_by_itself_is_named_and_forgiven(run):
    ended = run(FLAKY)
    assert 0 == ended.returncode, ended.stdout
    assert "failed once, passed when run by itself: test_it.py::test_late" in ended.stdout
    assert ended.stdout.endswith("\n1 passed, 0 failed\n")


def test_a_second_failure_is_a_failure(run):
    ended = run("def test_wrong(): assert False")
    assert 1 == ended.returncode
    assert "failed once, failed again: test_it.py::test_wrong" in ended.stdout


def test_many_failures_are_not_tried_again(run):
    ended = run("import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_wrong(n): assert False")
    assert 1 == ended.returncode
    assert "once more" not in ended.stdout


def test_a_file_that_cannot_be_collected_is_a_failure(run):
    assert 0 != run("import nothing_of_this_name").returncode
