"""A file of a run directory that is no plain file is refused, not waited for."""

import os
from pathlib import Path

import msgspec
import pytest

from holter import files
from holter.files import encoded, read_json, read_plain, write_whole
from holter.halting import halt_record
from holter.records import Attached, Observation


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


def test_what_is_no_text_is_written_all_the_same() -> None:
    """A script's argument, or the name of a file in an exception, may hold any bytes."""
    odd = os.fsdecode(b"--data=\xff\xfe")
    attached = Attached(
        pid=1, host=odd, world_size=1, local_rank=0, command=["train.py", odd], versions={odd: odd}, environment={}
    )
    observation = Observation(rank=0, step=3, at_ns=5, body=attached)
    for encode, decode in (
        (msgspec.msgpack.encode, msgspec.msgpack.decode),
        (msgspec.json.encode, msgspec.json.decode),
    ):
        found = decode(encoded(observation, encode), type=Observation)
        assert (0, 3, 5) == (found.rank, found.step, found.at_ns)
        assert ["train.py", r"--data=\udcff\udcfe"] == found.body.command
    ordinary = msgspec.structs.replace(
        observation, body=msgspec.structs.replace(attached, host="a", command=[], versions={})
    )
    assert msgspec.msgpack.encode(ordinary) == encoded(ordinary, msgspec.msgpack.encode)


def test_a_link_in_the_place_of_what_is_written_beside_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / f".run.json.{os.getpid()}").symlink_to(precious)
    write_whole(tmp_path / "run.json", b"{}")
    assert ("mine", b"{}") == (precious.read_text(), (tmp_path / "run.json").read_bytes())
    assert not (tmp_path / "run.json").is_symlink()
