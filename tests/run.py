"""pytest, and one more try for the few tests that a busy machine failed: `python -m tests.run -m job`.

Real jobs on two shared cores are now and then too slow for what a test waits for. At most MOST tests are run again, each by itself, when all
others have ended; the last lines name them. More failures than that, or a second one, are failures.
"""

import subprocess
import sys
from collections.abc import Sequence

import pytest

MOST = 3


class Failures:
    """Hears which tests failed, also from the workers of xdist."""

    def __init__(self) -> None:
        self.tests: list[str] = []
        self.others: list[str] = []
        """Files that could not be collected."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test may fail at its setup, its call and its teardown."""
        if report.failed and report.nodeid not in self.tests:
            self.tests.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """What was not collected was not run."""
        if report.failed:
            self.others.append(report.nodeid)


def main(arguments: Sequence[str]) -> int:
    """Pytest's exit code, or that of the second try."""
    failures = Failures()
    code = int(pytest.main(list(arguments), plugins=[failures]))
    if code != pytest.ExitCode.TESTS_FAILED or failures.others or not 0 < len(failures.tests) <= MOST:
        return code
    print(f"\nonce more, each by itself: {', '.join(failures.tests)}", flush=True)
    again = {
        test: subprocess.run([sys.executable, "-m", "pytest", test], check=False).returncode for test in failures.tests
    }
    for test, second in again.items():
        print(f"failed once, {'failed again' if second else 'passed when run by itself'}: {test}", flush=True)
    num_failed = sum(map(bool, again.values()))
    print(f"{len(again) - num_failed} passed, {num_failed} failed", flush=True)
    return pytest.ExitCode.TESTS_FAILED if num_failed else pytest.ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
