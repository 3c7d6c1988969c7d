"""The runner forgives what passes by itself, a few at most, and says so in its last lines."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.run import PARTS, parts

RUN = Path(__file__).parent / "run.py"


@pytest.fixture
def run(tmp_path):
    def start(text):
        (tmp_path / "test_it.py").write_text(text)
        return subprocess.run(
            [sys.executable, RUN, "-q"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
        )

    return start


FLAKY = """
from pathlib import Path
def test_late():
    seen = Path("seen")
    is_second = seen.exists()
    seen.touch()
    assert is_second
"""


def test_what_only_a_release_needs_is_left_out_unless_all_is_asked_for():
    assert all(words[-1].endswith(" and not release") for words in parts([]))
    assert [marks for _, marks in PARTS] == [words[-1] for words in parts(["--all"])]
    assert [["tests/kernels", "-x"]] == parts(["tests/kernels", "-x"])


@pytest.mark.slow
def test_a_test_that_passes_by_itself_is_forgiven_and_named_in_the_last_line(run):
    ended = run(FLAKY)
    assert 0 == ended.returncode, ended.stdout
    assert ended.stdout.endswith("\nfailed once, passed when run by itself: test_it.py::test_late\n")


@pytest.mark.slow
def test_a_second_failure_is_a_failure(run):
    ended = run("def test_wrong(): assert False")
    assert 1 == ended.returncode
    assert ended.stdout.endswith("\nfailed once, failed again: test_it.py::test_wrong\n")


@pytest.mark.slow
def test_many_failures_are_not_tried_again(run):
    ended = run("import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_wrong(n): assert False")
    assert 1 == ended.returncode
    assert "failed once" not in ended.stdout


@pytest.mark.slow
def test_a_file_that_cannot_be_collected_is_a_failure(run):
    ended = run("import nothing_of_this_name")
    assert 0 != ended.returncode
    assert "failed once" not in ended.stdout
