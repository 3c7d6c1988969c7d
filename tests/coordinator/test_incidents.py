"""Incidents survive the coordinator, and a cause that comes back is counted."""

import contextlib
import dataclasses
import os
import sqlite3
from pathlib import Path

import msgspec
import pytest
from tests.coordinator.conftest import attached, done

from holter import clock
from holter.coordinator.disk import Disk
from holter.coordinator.incidents import DATABASE, MAX_DATABASE_BYTES, PATIENCE_S, SETTLE_S, Incidents
from holter.coordinator.judge import IncidentTracker, cause_of
from holter.coordinator.window.assembly import Assembly
from holter.faults import ALL, CAUSES, Window
from holter.files import write_whole
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


def judged(book: IncidentTracker, step: int, now_ns: int = SECOND_NS) -> list[Diagnosis]:
    window = nan_at(step)
    return list(book.settle(findings(window), window, now_ns))


def test_the_same_fault_seen_again_is_no_second_incident() -> None:
    book = IncidentTracker("r", "notify")
    (first,) = judged(book, 5)
    assert ("19700101T000001-1", 1.0, 1) == (first.id, first.detected_after_s, first.strikes)
    assert [] == judged(book, 5, 2 * SECOND_NS)


def test_a_cause_that_comes_back_after_a_restart_is_a_second_strike() -> None:
    (first,) = judged(IncidentTracker("r", "notify"), 5)
    (second,) = judged(IncidentTracker("r", "notify", [first]), 9)
    assert (cause_of(first), 2) == (cause_of(second), second.strikes)


def test_the_next_coordinator_knows_the_incidents_of_the_last(tmp_path: Path) -> None:
    disk = Disk()
    kept = Incidents(tmp_path, disk)
    (found,) = judged(IncidentTracker("r", "notify"), 5)
    kept.put(found)
    assert disk.close(5.0)
    again = Incidents(tmp_path, Disk())
    again.load()
    assert ([found], found) == (again.all(), again.get(found.id))
    assert ([], {cause_of(found): 1}) == (again.open(), +again.by_cause()), "a resumed run is not paged about again"
    again.meet_again([found.id])
    assert [(cause_of(found), "critical")] == again.open(), "one whose coordinator died is"
    assert [found] == again.settled(), "at once: whoever was told shall not hear meanwhile that it is over"


def test_what_is_counted_begins_at_0_and_never_falls(tmp_path: Path) -> None:
    disk = Disk()
    kept = Incidents(tmp_path, disk)
    assert dict.fromkeys(CAUSES, 0) == kept.by_cause()
    (found,) = judged(IncidentTracker("r", "notify"), 5)
    revised = msgspec.structs.replace(found.causes[0], cause="nonfinite_input")
    kept.put(found)
    kept.put(msgspec.structs.replace(found, causes=(revised,)))
    kept.put(found)
    both = {cause_of(found): 1, "nonfinite_input": 1}
    assert both == +kept.by_cause(), "a cause that was revised was one too"
    assert disk.close(5.0)
    again = Incidents(tmp_path, Disk())
    again.load()
    assert both == +again.by_cause(), "also in the next coordinator"


def test_the_newest_of_each_severity_says_when_it_was_opened(tmp_path: Path) -> None:
    kept = Incidents(tmp_path, Disk())
    (found,) = judged(IncidentTracker("r", "notify"), 5)
    for number, at in enumerate(("2026-11-15T10:15:00Z", "2026-11-15T10:15:30Z", "2026-11-15T10:15:10Z")):
        kept.put(msgspec.structs.replace(found, id=f"T-{number}", opened_at=at))
    assert {"critical": 1794737730.0} == kept.opened_s()
    kept.put(
        msgspec.structs.replace(found, id="T-1", opened_at="2026-11-15T10:15:30Z", closed_at="2026-11-15T10:20:00Z")
    )
    assert {"critical": 1794737710.0} == kept.opened_s()


def test_a_pager_waits_until_the_blame_has_settled(tmp_path: Path) -> None:
    def passes(seconds: float) -> None:
        known = kept._blame[found.id]
        kept._blame[found.id] = dataclasses.replace(
            known, first_s=known.first_s - seconds, since_s=known.since_s - seconds
        )

    def lay(confidence: float, *ranks: int) -> None:
        cause = msgspec.structs.replace(found.causes[0], confidence=confidence, ranks=ranks)
        kept.put(msgspec.structs.replace(found, causes=(cause,)))

    kept = Incidents(tmp_path, Disk())
    (found,) = judged(IncidentTracker("r", "notify"), 5)
    lay(0.93, 0)
    assert (1, []) == (len(kept.open()), kept.settled())
    passes(SETTLE_S - 0.5)
    lay(0.55, 1)
    passes(SETTLE_S)
    assert [] == kept.settled(), "another rank, and not sure"
    lay(0.93, 1)
    assert [found.id] == [one.id for one in kept.settled()], "the same rank for long enough"
    lay(0.55, 0)
    assert [] == kept.settled()
    passes(PATIENCE_S)
    lay(0.55, 1)
    assert [found.id] == [one.id for one in kept.settled()], "nobody is waited for for ever"


def test_a_database_that_is_none_is_as_no_database(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"not a database at all" * 100)
    kept = Incidents(tmp_path, Disk())
    kept.load()
    assert [] == kept.all()


def test_a_bad_row_hides_no_other_and_its_id_names_no_folder(tmp_path: Path) -> None:
    """Of ten rows, one spoiled in each way, the other nine are read, and the tenth from its file; an id that would lead elsewhere is none."""
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    disk = Disk()
    kept = Incidents(run_dir, disk)
    (found,) = judged(IncidentTracker("r", "notify"), 5)
    for number in range(1, 11):
        kept.put(msgspec.structs.replace(found, id=f"20261115T101500-{number}"))
    assert disk.close(5.0)
    content = msgspec.json.encode(msgspec.structs.replace(found, id="../../../escape-1"))
    spoiled = [b"", b"{", b"\xff\xfe", content, b"[" * 100_000, 7, "text"]
    for row in spoiled:
        with sqlite3.connect(run_dir / "incidents.sqlite") as database:
            before = database.execute("SELECT diagnosis FROM diagnoses WHERE id LIKE '%-5'").fetchone()[0]
            database.execute("UPDATE diagnoses SET diagnosis = ? WHERE id LIKE '%-5'", (row,))
        disk = Disk()
        again = Incidents(run_dir, disk)
        again.load()
        assert again.num_unreadable == 1, row
        assert [f"20261115T101500-{number}" for number in range(1, 11)] == [one.id for one in again.all()]
        again.close_former(10**18)
        assert disk.close(5.0)
        with sqlite3.connect(run_dir / "incidents.sqlite") as database:
            database.execute("UPDATE diagnoses SET diagnosis = ? WHERE id LIKE '%-5'", (before,))
    assert not list(tmp_path.rglob("escape*"))


def test_a_damaged_database_is_put_aside_and_nothing_is_lost(tmp_path: Path) -> None:
    disk = Disk()
    kept = Incidents(tmp_path, disk)
    (found,) = judged(IncidentTracker("r", "notify"), 5)
    for number in range(1, 4):
        kept.put(msgspec.structs.replace(found, id=f"20261115T101500-{number}"))
    assert disk.close(5.0)
    (tmp_path / DATABASE).write_bytes(b"not a database at all" * 1000)
    for _ in range(2):
        disk = Disk()
        again = Incidents(tmp_path, disk)
        again.load()
        assert kept.all() == again.all()
        assert disk.close(5.0)
        assert 0 == disk.failures
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        assert 3 == database.execute("SELECT count(*) FROM diagnoses").fetchone()[0]


_ROWS_WITHOUT_END = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT i, i, i FROM r"
FOREIGN = {
    "trigger": ["CREATE TRIGGER t AFTER INSERT ON diagnoses BEGIN DELETE FROM diagnoses; END"],
    "endless": ["DROP TABLE diagnoses", "CREATE VIEW diagnoses (id, diagnosis, checksum) AS " + _ROWS_WITHOUT_END],
    "many": ["INSERT INTO diagnoses " + _ROWS_WITHOUT_END + " LIMIT 60000"],
    "large": [],
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_database_with_what_we_never_wrote_costs_neither_time_nor_incidents(kind: str, tmp_path: Path) -> None:
    disk = Disk()
    kept = Incidents(tmp_path, disk)
    kept.put(*judged(IncidentTracker("r", "notify"), 5))
    assert disk.close(5.0)
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as database, database:
        for statement in FOREIGN[kind]:
            database.execute(statement)
    if kind == "large":
        os.truncate(tmp_path / DATABASE, MAX_DATABASE_BYTES + 1)
    disk = Disk()
    again = Incidents(tmp_path, disk)
    began_s = clock.monotonic_s()
    again.load()
    assert clock.monotonic_s() - began_s < 20.0
    assert kept.all() == again.all()
    assert disk.close(10.0)
    assert (tmp_path / f"{DATABASE}.damaged").exists()
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        assert 1 == database.execute("SELECT count(*) FROM diagnoses").fetchone()[0]


def test_of_very_many_incidents_the_oldest_closed_ones_are_on_the_disk_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holter.coordinator.incidents.MAX_IN_MEMORY", 5)
    kept = Incidents(tmp_path, Disk())
    (found,) = judged(IncidentTracker("r", "notify"), 5)
    for number in range(1, 21):
        closed_at = None if number == 1 else "2026-11-15T10:15:00Z"
        kept.put(msgspec.structs.replace(found, id=f"20261115T101500-{number}", closed_at=closed_at))
    assert [1, 17, 18, 19, 20] == [int(one.id.rpartition("-")[2]) for one in kept.all()]
    assert 20 == kept.by_cause()[found.causes[0].cause]


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"first")
    write_whole(tmp_path / "a", b"second", 0o600)
    assert (b"second", 0o600) == ((tmp_path / "a").read_bytes(), (tmp_path / "a").stat().st_mode & 0o777)
    assert ["a"] == [path.name for path in tmp_path.iterdir()]


def test_a_disk_that_fails_is_counted_and_goes_on(tmp_path: Path) -> None:
    disk = Disk()
    disk.submit(lambda: write_whole(tmp_path / "none" / "a", b""))
    disk.submit(lambda: write_whole(tmp_path / "b", b""))
    assert disk.close(5.0)
    assert (1, True) == (disk.failures, (tmp_path / "b").exists())
    assert "No such file" in disk.last_failure


def test_a_database_that_somebody_locks_is_not_damaged_and_not_waited_for(tmp_path: Path) -> None:
    disk = Disk()
    first = Incidents(tmp_path, disk)
    first.put(judged(IncidentTracker("r", "halt"), 3)[0])
    assert disk.close(10.0)
    locked = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
    locked.execute("PRAGMA locking_mode=EXCLUSIVE")
    locked.execute("BEGIN EXCLUSIVE")
    began_s = clock.monotonic_s()
    disk = Disk()
    again = Incidents(tmp_path, disk)
    again.load()
    disk.submit((tmp_path / "behind").touch)
    assert disk.close(3.0), "what else is to be written does not wait"
    locked.close()
    assert clock.monotonic_s() - began_s < 4.0
    assert [one.id for one in first.all()] == [one.id for one in again.all()], "read from its file"
    assert not list(tmp_path.glob("*.damaged"))
