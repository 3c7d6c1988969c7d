"""Incidents survive the coordinator, and a cause that comes back is counted."""

from pathlib import Path

from tests.coordinator.conftest import attached, done

from holter.coordinator.assembly import Assembly
from holter.coordinator.casebook import Casebook, cause_of
from holter.coordinator.disk import Disk, write_atomically
from holter.coordinator.incidents import DATABASE, Incidents
from holter.detectors import ALL, Window
from holter.records import Diagnosis, Finding, Nonfinite

NAN = [Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)]
SECOND_NS = 10**9


def nan_at(step: int) -> Window:
    built = Assembly(1)
    built.add(attached(0, 1), 0)
    built.add(done(0, step, nonfinite=NAN), 0)
    return built.window(SECOND_NS)


def findings(window: Window) -> list[Finding]:
    return [finding for detector in ALL for finding in detector.judge(window)]


def judged(book: Casebook, step: int, now_ns: int = SECOND_NS) -> list[Diagnosis]:
    window = nan_at(step)
    return list(book.settle(findings(window), window, now_ns))


def test_the_same_fault_seen_again_is_no_second_incident() -> None:
    book = Casebook("r", "notify")
    (first,) = judged(book, 5)
    assert ("19700101T000001-1", 1.0, 1) == (first.id, first.detected_after_s, first.strikes)
    assert [] == judged(book, 5, 2 * SECOND_NS)


def test_a_cause_that_comes_back_after_a_restart_is_a_second_strike() -> None:
    (first,) = judged(Casebook("r", "notify"), 5)
    (second,) = judged(Casebook("r", "notify", [first]), 9)
    assert (cause_of(first), 2) == (cause_of(second), second.strikes)


def test_the_next_coordinator_knows_the_incidents_of_the_last(tmp_path: Path) -> None:
    disk = Disk()
    kept = Incidents(tmp_path, disk)
    (found,) = judged(Casebook("r", "notify"), 5)
    kept.put(found)
    assert disk.close(5.0)
    again = Incidents(tmp_path, Disk())
    again.load()
    assert ([found], found) == (again.all(), again.get(found.id))
    assert ([(cause_of(found), "critical")], {cause_of(found): 1}) == (again.open(), again.by_cause())


def test_a_database_that_is_none_is_as_no_database(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"not a database at all" * 100)
    kept = Incidents(tmp_path, Disk())
    kept.load()
    assert [] == kept.all()


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"first")
    write_atomically(tmp_path / "a", b"second", 0o600)
    assert (b"second", 0o600) == ((tmp_path / "a").read_bytes(), (tmp_path / "a").stat().st_mode & 0o777)
    assert ["a"] == [path.name for path in tmp_path.iterdir()]


def test_a_disk_that_fails_is_counted_and_goes_on(tmp_path: Path) -> None:
    disk = Disk()
    disk.submit(lambda: write_atomically(tmp_path / "none" / "a", b""))
    disk.submit(lambda: write_atomically(tmp_path / "b", b""))
    assert disk.close(5.0)
    assert (1, True) == (disk.failures, (tmp_path / "b").exists())
    assert "No such file" in disk.last_failure
