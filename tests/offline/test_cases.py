"""Cases that were made by really running small jobs, or by the tools that write the format: each has its cause, its onset, or silence.

How they were made, and what is expected of each: `tests/offline/cases/record.py`.
"""

import tarfile
from pathlib import Path

import pytest
from tests.offline.cases.expected import FILE, load
from tests.offline.cases.score import score

CASES = load()


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    with tarfile.open(FILE.with_name("cases.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("name", [name for name, expected in CASES.items() if expected is None])
def test_a_healthy_run_is_silent(name: str, cases: Path) -> None:
    assert () == score(cases / name, None).found


@pytest.mark.parametrize("name", [name for name, expected in CASES.items() if expected is not None])
def test_a_fault_has_its_cause_first_and_its_onset(name: str, cases: Path) -> None:
    found = score(cases / name, CASES[name])
    assert found.is_cause_right, found
    assert found.is_onset_right, found
