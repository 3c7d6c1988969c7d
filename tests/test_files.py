"""A file of a run directory that is no plain file is refused, not waited for."""

import os
from pathlib import Path

import pytest

from holter import files
from holter.files import read_json, read_plain
from holter.halting import halt_record


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "folder", "endless", "too large"])
def test_what_is_no_plain_file_is_not_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "endless":
            path.symlink_to("/dev/zero")
        case _:
            monkeypatch.setattr(files, "MAX_BYTES", 8)
            path.write_text("[1,2,3,4,5]")
    with pytest.raises(OSError, match=r"run\.json"):
        read_plain(path)
    assert read_json(path, list) is None


def test_a_halt_that_cannot_be_read_stands(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "halt.json")
    found = halt_record.read(tmp_path)
    assert found is not None
    assert "cannot be read" in found.why
