"""What `make test` and `make test-all` run: pytest in three parts, and a second try for the few tests that a busy machine failed.

    python -m tests.run          without what is marked `release`: at least one real job for every mechanism
    python -m tests.run --all    everything; what a release needs
    python -m tests.run WORDS    one part, with these words for pytest

Real jobs on two shared cores are now and then too slow for what a test waits for. At most MOST tests are tried again, each by itself, when all
parts have ended; the very last lines name them. More failures than that, or a second failure, are failures. Nothing else tries again.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

MOST = 3
PARTS = (
    (["-n", "2", "--durations", "20"], "not job"),
    # Jobs wait half of their time: two at once do each other no harm. A file's jobs share what they are compared with.
    (
        [
            "-n",
            "2",
            "--dist",
            "loadfile",
            "--ignore",
            "tests/corpus",
            "--ignore",
            "tests/campaign",
            "--durations",
            "20",
        ],
        "job",
    ),
    # Faults have the machine to themselves: their times are looked at, and slow ranks are missed for want of processor time.
    (["tests/corpus", "tests/campaign", "--durations", "10"], "job"),
)
"""Words for pytest, and marks."""


def parts(arguments: Sequence[str]) -> list[list[str]]:
    """What is given to pytest, a list for each part."""
    if arguments and list(arguments) != ["--all"]:
        return [list(arguments)]
    more = "" if arguments else " and not release"
    return [[*words, "-m", marks + more] for words, marks in PARTS]


def failures(words: Sequence[str]) -> tuple[int, list[str]]:
    """Pytest's exit code, and what failed: tests, or files that could not be collected."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", *words, "-o", f"cache_dir={cache}"]
        code = subprocess.run(command, check=False).returncode
        failed = Path(cache, "v/cache/lastfailed")
        return code, list(json.loads(failed.read_text())) if failed.exists() else []


def main(arguments: Sequence[str]) -> int:
    """Pytest's exit code, or that of the second try."""
    failed: list[str] = []
    for words in parts(arguments):
        code, new = failures(words)
        failed += new
        is_forgivable = code == pytest.ExitCode.TESTS_FAILED and new and all("::" in test for test in new)
        if code != pytest.ExitCode.OK and not (is_forgivable and len(failed) <= MOST):
            return code
    again = {test: failures([test])[0] for test in failed}
    for test, code in again.items():
        print(f"failed once, {'failed again' if code else 'passed when run by itself'}: {test}", flush=True)
    return pytest.ExitCode.TESTS_FAILED if any(again.values()) else pytest.ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
