"""The incidents of a run: in memory for whoever asks, in SQLite for the next coordinator, in files for people.

    incidents.sqlite              every diagnosis as JSON, newest version
    incidents/<id>/diagnosis.json diagnosis.md  report.html  evidence/

Memory comes first: a disk that is full or gone loses no incident while the coordinator lives.
"""

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from holter.coordinator.casebook import cause_of
from holter.coordinator.disk import Disk, write_atomically
from holter.diagnosis import report
from holter.records import Diagnosis, Severity

DATABASE = "incidents.sqlite"
FOLDER = "incidents"

_SCHEMA = "CREATE TABLE IF NOT EXISTS incidents (id TEXT PRIMARY KEY, diagnosis BLOB NOT NULL)"
_UPSERT = "INSERT INTO incidents VALUES (?, ?) ON CONFLICT(id) DO UPDATE SET diagnosis = excluded.diagnosis"


class Incidents:
    """All incidents of a run, those of an earlier coordinator on the same run directory too."""

    def __init__(self, run_dir: Path, disk: Disk) -> None:
        self._run_dir = run_dir
        self._disk = disk
        self._by_id: dict[str, Diagnosis] = {}

    def load(self) -> None:
        """Read what an earlier coordinator left; raises nothing: a database that cannot be read is as none."""
        with contextlib.suppress(sqlite3.Error, OSError, msgspec.MsgspecError):
            for diagnosis in _stored(self._run_dir / DATABASE):
                self._by_id[diagnosis.id] = diagnosis

    def put(self, diagnosis: Diagnosis) -> None:
        """A new incident, or a better explanation of a known one."""
        self._by_id[diagnosis.id] = diagnosis
        self._disk.submit(partial(_store, self._run_dir / DATABASE, diagnosis))
        self._disk.submit(partial(write_files, self._run_dir / FOLDER / diagnosis.id, diagnosis))

    def get(self, incident_id: str) -> Diagnosis | None:
        """One incident."""
        return self._by_id.get(incident_id)

    def all(self) -> list[Diagnosis]:
        """Oldest first."""
        return list(self._by_id.values())

    def open(self) -> list[tuple[str, Severity]]:
        """(cause, severity) of those that are not closed."""
        return [(cause_of(found), found.severity) for found in self._by_id.values() if found.closed_at is None]

    def by_cause(self) -> Counter[str]:
        """How many there were, by leading cause."""
        return Counter(cause_of(found) for found in self._by_id.values())


def write_files(folder: Path, diagnosis: Diagnosis) -> None:
    """What a person opens; each file whole or not at all."""
    evidence = folder / "evidence"
    evidence.mkdir(parents=True, exist_ok=True)
    for cause in diagnosis.causes:
        for number, proof in enumerate(cause.evidence, start=1):
            write_atomically(evidence / f"{cause.cause}-{number}.json", _pretty(proof))
    write_atomically(folder / "diagnosis.md", report.to_markdown(diagnosis).encode())
    write_atomically(folder / "report.html", report.to_html(diagnosis).encode())
    # Last: whoever sees it finds the others.
    write_atomically(folder / "diagnosis.json", _pretty(diagnosis))


def _pretty(record: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


@contextlib.contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, timeout=5.0)) as connection, connection:
        # Shared file systems cannot do it; the default journal is slower and as safe.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(_SCHEMA)
        yield connection


def _store(path: Path, diagnosis: Diagnosis) -> None:
    with _database(path) as connection:
        connection.execute(_UPSERT, (diagnosis.id, msgspec.json.encode(diagnosis)))


def _stored(path: Path) -> list[Diagnosis]:
    if not path.exists():
        return []
    with _database(path) as connection:
        rows = connection.execute("SELECT diagnosis FROM incidents ORDER BY rowid").fetchall()
    return [msgspec.json.decode(content, type=Diagnosis) for (content,) in rows]
