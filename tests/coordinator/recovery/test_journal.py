"""What was appended comes back, in order, whatever happened to the last bytes."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.coordinator.conftest import attached, census, done, exited

from holter.coordinator.disk import Disk
from holter.coordinator.recovery import journal
from holter.coordinator.recovery.journal import Entry, Journal


def write(folder: Path, entries: list[Entry], **options: int) -> Journal:
    disk, kept = Disk(), Journal(folder, **options)
    for entry in entries:
        kept.append(entry.received_ns, entry.observation)
    kept.flush(disk)
    assert disk.close(5.0)
    return kept


def entries(num_steps: int) -> list[Entry]:
    said = [attached(0), census(0), *(done(0, step) for step in range(num_steps)), exited(0, num_steps)]
    return [Entry(number, observation) for number, observation in enumerate(said)]


def test_everything_comes_back_in_order(tmp_path: Path) -> None:
    said = entries(20)
    write(tmp_path, said)
    assert said == list(journal.read(tmp_path))


def test_a_second_coordinator_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    said = entries(20)
    write(tmp_path, said[:10])
    write(tmp_path, said[10:])
    assert said == list(journal.read(tmp_path))


@settings(max_examples=30, deadline=None)
@given(lost=st.integers(1, 400))
def test_a_torn_tail_loses_only_the_tail(tmp_path_factory: pytest.TempPathFactory, lost: int) -> None:
    folder = tmp_path_factory.mktemp("journal")
    said = [Entry(step, done(0, step)) for step in range(20)]
    write(folder, said)
    (path,) = (path for number, path in journal.segments(folder) if number != journal.IDENTITY)
    path.write_bytes(path.read_bytes()[:-lost])
    found = list(journal.read(folder))
    assert said[: len(found)] == found
    assert len(found) >= 20 - 1 - lost // 100


def stream_of(folder: Path) -> Path:
    (path,) = (path for number, path in journal.segments(folder) if number != journal.IDENTITY)
    return path


@settings(max_examples=200, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_the_entry_that_it_hit_and_is_told(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    said = [Entry(step, done(0, step)) for step in range(20)]
    write(folder, said)
    content = bytearray(stream_of(folder).read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    stream_of(folder).write_bytes(content)
    damage: list[str] = []
    found = list(journal.read(folder, damage))
    assert len(found) == 19
    assert all(entry in said for entry in found)
    assert len(damage) == 1


def test_whoever_appends_behind_a_torn_tail_is_read(tmp_path: Path) -> None:
    said = [Entry(step, done(0, step)) for step in range(20)]
    write(tmp_path, said[:10])
    stream_of(tmp_path).write_bytes(stream_of(tmp_path).read_bytes()[:-7])
    write(tmp_path, said[10:])
    assert said[:9] + said[10:] == list(journal.read(tmp_path))


def test_a_file_that_only_looks_like_a_journal_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_WASTED_BYTES", 2**20)
    (tmp_path / "0001.msgpack").write_bytes((journal.MARK + b"\xff\xff\x0f\x00abcd") * 20_000)
    damage: list[str] = []
    assert [] == list(journal.read(tmp_path, damage))
    assert len(damage) == 1


def test_a_census_that_many_ranks_share_is_written_once(tmp_path: Path) -> None:
    said = [Entry(rank, census(rank, names=[f"layers.{number}.weight" for number in range(300)])) for rank in range(64)]
    write(tmp_path, said)
    assert said == list(journal.read(tmp_path))
    size = (tmp_path / "0000.msgpack").stat().st_size
    write(tmp_path / "alone", said[:1])
    assert size < 3 * (tmp_path / "alone" / "0000.msgpack").stat().st_size


def test_a_death_is_kept_however_many_censuses_there_are(tmp_path: Path) -> None:
    censuses = [census(rank, names=[f"model{rank}.{number}.weight" for number in range(300)]) for rank in range(64)]
    said = [Entry(number, observation) for number, observation in enumerate([*censuses, exited(3, 12)])]
    kept = write(tmp_path, said, limit_bytes=256 * 1024)
    assert kept.dropped > 0
    assert said[-1] == list(journal.read(tmp_path))[-1]


def test_the_oldest_goes_and_identity_stays(tmp_path: Path) -> None:
    kept = Journal(tmp_path, limit_bytes=64 * 1024, num_segments=4)
    kept.append(0, attached(0))
    for step in range(3000):
        kept.append(1 + step, done(0, step))
        if step % 20 == 0:
            disk = Disk()
            kept.flush(disk)
            assert disk.close(5.0)
    size = sum(path.stat().st_size for _, path in journal.segments(tmp_path))
    assert size < 64 * 1024
    found = list(journal.read(tmp_path))
    assert attached(0).body == found[0].observation.body
    assert found[-1].observation.step > 2900


def test_a_disk_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file where a folder should be")
    kept = write(tmp_path / "journal", entries(3))
    assert kept.dropped > 0


def test_a_disk_that_hangs_costs_records_not_memory(tmp_path: Path) -> None:
    kept = Journal(tmp_path)
    kept._is_writing = True
    while kept.dropped == 0:
        kept.append(0, done(0, 1))
    assert kept._buffered_bytes <= journal.MAX_BUFFER_BYTES


@pytest.mark.parametrize("odd", ["pipe", "folder", "loop", "endless", "1².msgpack", "9" * 200 + ".msgpack"])
def test_what_lies_among_its_files_and_is_none_of_them_is_passed_over(odd: str, tmp_path: Path) -> None:
    said = entries(4)
    write(tmp_path, said[:-1])
    place = tmp_path / "0007.msgpack"
    match odd:
        case "pipe":
            os.mkfifo(place)
        case "folder":
            place.mkdir()
        case "loop":
            place.symlink_to(place.name)
        case "endless":
            place.symlink_to("/dev/zero")
        case _:
            (tmp_path / odd).write_bytes(b"no journal")
    assert said[:-1] == list(journal.read(tmp_path))
    assert journal.written_ns(tmp_path) > 0
    write(tmp_path, said[-1:])
    assert said == list(journal.read(tmp_path))


def test_a_link_in_the_place_of_a_segment_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "0001.msgpack").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        journal._append(folder / "0001.msgpack", [b"x"])
    assert "mine" == precious.read_text()
