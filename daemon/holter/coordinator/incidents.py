"""The incidents of a run: in memory for readers, in SQLite for the next coordinator, in files for people.

    incidents.sqlite              every diagnosis as JSON, newest version, with its checksum; every cause that was ever named
    incidents/<id>/diagnosis.json diagnosis.md  report.html  evidence/

Memory comes first: a full or missing disk loses no incident while the coordinator lives. A damaged row is read from its
files; a damaged database is put aside and made anew. If there are very many incidents, the oldest closed ones are on
the disk alone.
"""

import contextlib
import math
import re
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from holter import clock
from holter.coordinator.disk import Disk
from holter.coordinator.judge import cause_of, confidence_of
from holter.diagnosis import report
from holter.diagnosis.explain import SURE
from holter.faults import CAUSES
from holter.files import UNREADABLE, as_json, read_json, write_whole
from holter.records import Diagnosis, Severity

SETTLE_S, UNSURE_S, PATIENCE_S = 2.0, 5.0, 10.0
"""Seconds for which cause and ranks must have stayed the same before a pager is told, seconds for this if they are
unsure, and the longest wait."""
INCIDENT_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}-[0-9]{1,9}")
"""Pattern of incident ids, which are also names of folders."""
MAX_IN_MEMORY = 2000
LOAD_TIMEOUT_S = 0.3
"""Seconds to wait for somebody else's lock, a few times in a row, before the coordinator listens."""
LOAD_S = 3.0
"""Seconds for reading a whole database, because a view may have endless rows."""
PROGRESS_STEPS = 10_000
"""Number of steps of SQLite's machine between two looks at the time."""
MAX_ROWS = 50_000
MAX_DATABASE_BYTES = 512 * 2**20
"""Largest database that is read; a larger one is not ours, and checking it would take minutes."""
MAX_DIAGNOSIS_BYTES = 16 * 2**20
STORE_TIMEOUT_S = 1.0
"""Seconds to wait for a lock when writing, while all other writes wait; the incident is in its files, too."""
DATABASE = "incidents.sqlite"
FOLDER = "incidents"

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS diagnoses (id TEXT PRIMARY KEY, diagnosis BLOB NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS causes (id TEXT, cause TEXT, PRIMARY KEY (id, cause))",
)
_ROWS = "SELECT CASE WHEN length(diagnosis) <= ? THEN diagnosis END, checksum FROM diagnoses ORDER BY rowid LIMIT ?"
_FOREIGN = "SELECT 1 FROM sqlite_master WHERE type IN ('trigger', 'view')"
_UPSERT = "INSERT OR REPLACE INTO diagnoses VALUES (?, ?, ?)"
_COUNT = "INSERT OR IGNORE INTO causes VALUES (?, ?)"


@dataclass(frozen=True)
class _Blame:
    """The cause and ranks that an incident is blamed on, and since when."""

    on: tuple[str, tuple[int, ...]]
    is_sure: bool
    first_s: float
    """When the incident first became known here."""
    since_s: float
    """When this cause and these ranks were first blamed."""

    def is_settled(self, now_s: float) -> bool:
        stayed_s = SETTLE_S if self.is_sure else UNSURE_S
        return now_s - self.since_s >= stayed_s or now_s - self.first_s >= PATIENCE_S


class Incidents:
    """All incidents of a run, including those of an earlier coordinator on the same run directory."""

    def __init__(self, run_dir: Path, disk: Disk) -> None:
        self.num_unreadable = 0
        """Number of rows in an earlier coordinator's database that are no incidents."""
        self._run_dir = run_dir
        self._disk = disk
        self._by_id: dict[str, Diagnosis] = {}
        self._former: set[str] = set()
        """Ids of incidents from an earlier life of this run that this life has not seen again."""
        self._blame: dict[str, _Blame] = {}
        self._causes: set[tuple[str, str]] = set()
        """Every (id, cause) that was ever named; their counts only grow, even over a restart."""
        self._unwritten: set[str] = set()
        """Ids of those that the disk did not take."""
        self._forgotten: Counter[str] = Counter()
        """Causes of incidents that are no longer in memory."""

    def load(self) -> None:
        """Read what an earlier coordinator left. Never raises: what the database has lost is read from the files."""
        with contextlib.suppress(sqlite3.Error, OSError):
            found = _stored(self._run_dir / DATABASE)
            left = _in_files(self._run_dir / FOLDER, {one.id for one in found.diagnoses})
            self.num_unreadable = found.num_unreadable
            self._causes.update(found.causes)
            if found.is_damaged:
                self._disk.submit(partial(_put_aside, self._run_dir / DATABASE))
            # A locked one presumably holds them; waiting for it would hold up all other writes.
            lost = [] if found.is_locked else [*found.diagnoses, *left] if found.is_damaged else left
            for diagnosis in lost:
                self._disk.submit(partial(_store, self._run_dir / DATABASE, diagnosis))
            for diagnosis in sorted([*found.diagnoses, *left], key=_number):
                self._by_id[diagnosis.id] = diagnosis
                self._former.add(diagnosis.id)
                # Otherwise people who were told of it would hear that it is over, and a moment later that it is not.
                self._lay(diagnosis, first_s=-math.inf)

    def recall(self, diagnoses: Iterable[Diagnosis]) -> None:
        """Take over diagnoses that are written down already."""
        self._by_id |= {diagnosis.id: diagnosis for diagnosis in diagnoses}

    def put(self, diagnosis: Diagnosis) -> None:
        """Store a new incident, or a better explanation of a known one."""
        self._by_id[diagnosis.id] = diagnosis
        self._former.discard(diagnosis.id)
        self._lay(diagnosis)
        self._write(diagnosis)
        if len(self._by_id) > MAX_IN_MEMORY:
            self._forget()

    def _forget(self) -> None:
        oldest = next((one.id for one in self._by_id.values() if one.closed_at is not None), None)
        if oldest is not None:
            del self._by_id[oldest]
            self._blame.pop(oldest, None)
            self._former.discard(oldest)
            gone = {known for known in self._causes if known[0] == oldest}
            self._causes -= gone
            self._forgotten.update(cause for _, cause in gone)

    def get(self, incident_id: str) -> Diagnosis | None:
        """Return one incident; None if it is not in memory."""
        return self._by_id.get(incident_id)

    def all(self) -> list[Diagnosis]:
        """Return all incidents in memory, oldest first."""
        return list(self._by_id.values())

    def meet_again(self, ids: Iterable[str]) -> None:
        """Count these incidents to this life, because a coordinator that died a moment ago had found them."""
        self._former.difference_update(ids)

    def close_former(self, now_ns: int) -> list[Diagnosis]:
        """Close what a former life of the run left open, and return these incidents as they were."""
        over = [found for found in self._by_id.values() if found.id in self._former and found.closed_at is None]
        for found in over:
            closed = msgspec.structs.replace(found, closed_at=clock.rfc3339(now_ns))
            self._by_id[found.id] = closed
            self._write(closed)
        return over

    def standing(self) -> list[Diagnosis]:
        """Return the open incidents of this life: nobody is paged again about a run that was halted and resumed."""
        return [found for found in self._by_id.values() if found.closed_at is None and found.id not in self._former]

    def settled(self) -> list[Diagnosis]:
        """Return the open incidents that a pager is told about.

        The first diagnosis may name another rank a moment later, when all ranks have been heard, so they must have
        settled.
        """
        now_s = clock.monotonic_s()
        return [found for found in self.standing() if self._blame[found.id].is_settled(now_s)]

    def open(self) -> list[tuple[str, Severity]]:
        """Return (cause, severity) of the open incidents of this life."""
        return [(cause_of(found), found.severity) for found in self.standing()]

    def opened_s(self) -> dict[Severity, float]:
        """Return for each severity when its newest open incident was opened, in seconds since the epoch."""
        in_order = sorted(self.standing(), key=lambda found: found.opened_at)
        return {found.severity: clock.epoch_s(found.opened_at) for found in in_order}

    def _lay(self, diagnosis: Diagnosis, first_s: float = math.inf) -> None:
        self._causes.add((diagnosis.id, cause_of(diagnosis)))
        now_s, known = clock.monotonic_s(), self._blame.get(diagnosis.id)
        on = (cause_of(diagnosis), diagnosis.causes[0].ranks if diagnosis.causes else ())
        self._blame[diagnosis.id] = _Blame(
            on=on,
            is_sure=confidence_of(diagnosis) >= SURE,
            first_s=min(first_s, now_s) if known is None else known.first_s,
            since_s=now_s if known is None or known.on != on else known.since_s,
        )

    def write_again(self) -> None:
        """What a full disk did not take; to be called now and then."""
        for known in [self._by_id[id_] for id_ in list(self._unwritten) if id_ in self._by_id]:
            self._write(known)

    def _write(self, diagnosis: Diagnosis) -> None:
        self._unwritten.discard(diagnosis.id)
        for write in (
            partial(_store, self._run_dir / DATABASE, diagnosis),
            partial(write_files, self._run_dir / FOLDER / diagnosis.id, diagnosis),
        ):
            if not self._disk.submit(partial(self._try, write, diagnosis.id)):
                self._unwritten.add(diagnosis.id)

    def _try(self, write: Callable[[], None], incident_id: str) -> None:
        """In the disk's thread."""
        try:
            write()
        except (OSError, sqlite3.Error):
            self._unwritten.add(incident_id)
            raise

    def by_cause(self) -> Counter[str]:
        """Count incidents by leading cause; one whose explanation changed counts for each of its causes."""
        found = Counter(dict.fromkeys(CAUSES, 0))
        found.update(cause for _, cause in self._causes)
        found.update(self._forgotten)
        return found


def write_files(folder: Path, diagnosis: Diagnosis) -> None:
    """Write the files that people open; each is written completely or not at all."""
    evidence = folder / "evidence"
    evidence.mkdir(parents=True, exist_ok=True)
    for cause in diagnosis.causes:
        for number, proof in enumerate(cause.evidence, start=1):
            write_whole(evidence / f"{cause.cause}-{number}.json", as_json(proof))
    write_whole(folder / "diagnosis.md", report.to_markdown(diagnosis).encode())
    write_whole(folder / "report.html", report.to_html(diagnosis).encode())
    # This file comes last: whoever sees it finds the others, too.
    write_whole(folder / "diagnosis.json", as_json(diagnosis))


_UNUSABLE = (sqlite3.Error, UnicodeDecodeError)
"""Exceptions raised by a damaged database; sqlite3 quotes its content, which may be invalid UTF-8."""


@contextlib.contextmanager
def _database(path: Path, timeout_s: float = STORE_TIMEOUT_S) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, timeout=timeout_s)) as connection, connection:
        # Shared file systems do not support it; the default journal is slower and as safe.
        with contextlib.suppress(*_UNUSABLE):
            connection.execute("PRAGMA journal_mode=WAL")
        for table in _SCHEMA:
            connection.execute(table)
        yield connection


def _store(path: Path, diagnosis: Diagnosis) -> None:
    with _database(path) as connection:
        content = msgspec.json.encode(diagnosis)
        connection.execute(_UPSERT, (diagnosis.id, content, zlib.crc32(content)))
        connection.execute(_COUNT, (diagnosis.id, cause_of(diagnosis)))


class _Stored(NamedTuple):
    """The content of a database."""

    diagnoses: Sequence[Diagnosis] = ()
    causes: Sequence[tuple[str, str]] = ()
    """Every (id, cause) that was ever said of them."""
    num_unreadable: int = 0
    is_damaged: bool = False
    """Whether it cannot be read to its end."""
    is_locked: bool = False
    """Whether somebody else has locked it."""


def _stored(path: Path) -> _Stored:
    if not path.is_file():
        # Opening a pipe would wait for a writer.
        return _Stored()
    if path.stat().st_size > MAX_DATABASE_BYTES:
        return _Stored(is_damaged=True)
    rows: list[tuple[object, object]] = []
    said: list[tuple[object, object]] = []
    is_damaged = is_locked = False
    try:
        with _database(path, LOAD_TIMEOUT_S) as connection:
            # Read as bytes: invalid UTF-8 would stop the reading at its row.
            connection.text_factory = bytes
            connection.set_progress_handler(partial(_is_late, clock.monotonic_s() + LOAD_S), PROGRESS_STEPS)
            # Ours has only tables: a trigger could undo what is written.
            is_damaged = connection.execute(_FOREIGN).fetchone() is not None
            rows += connection.execute(_ROWS, (MAX_DIAGNOSIS_BYTES, MAX_ROWS))
            said += connection.execute("SELECT id, cause FROM causes LIMIT ?", (MAX_ROWS,))
            checked = connection.execute("PRAGMA quick_check(1)").fetchone()
            is_damaged = is_damaged or len(rows) == MAX_ROWS or checked not in [(b"ok",), ("ok",)]
    except _UNUSABLE as error:
        # A database that somebody else has locked is not damaged; the incidents' own files are read instead.
        is_locked = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        is_damaged = not is_locked
    read = [_incident(content, checksum) for content, checksum in rows]
    diagnoses = [one for one in read if one is not None]
    known = {one.id for one in diagnoses}
    causes = [(_text(incident), _text(cause)) for incident, cause in said]
    named = [(incident, cause) for incident, cause in causes if incident in known and cause in CAUSES]
    return _Stored(diagnoses, named, read.count(None), is_damaged, is_locked)


def _is_late(until_s: float) -> bool:
    return clock.monotonic_s() > until_s


def _incident(content: object, checksum: object) -> Diagnosis | None:
    """Decode a row; None if it is no diagnosis, was changed since it was written, or has a foreign id."""
    if not isinstance(content, bytes) or zlib.crc32(content) != checksum:
        return None
    return _decoded(content)


def _decoded(content: bytes) -> Diagnosis | None:
    try:
        found = msgspec.json.decode(content, type=Diagnosis)
    except UNREADABLE:
        return None
    return found if INCIDENT_ID.fullmatch(found.id) else None


def _in_files(folder: Path, known: Container[str]) -> list[Diagnosis]:
    """Return the incidents in folders of their own name that are not among the known ones."""
    names = [path for path in folder.glob("*/diagnosis.json") if path.parent.name not in known]
    found = [read_json(path, Diagnosis) for path in names]
    return [one for one, path in zip(found, names, strict=True) if one is not None and _is_of(one, path.parent.name)]


def _is_of(diagnosis: Diagnosis, folder: str) -> bool:
    return diagnosis.id == folder and INCIDENT_ID.fullmatch(folder) is not None


def _number(diagnosis: Diagnosis) -> tuple[str, int]:
    """Return a sort key in the order in which incidents were opened."""
    stem, _, number = diagnosis.id.rpartition("-")
    return stem, int(number)


def _put_aside(path: Path) -> None:
    """Rename a damaged database, so that an expert can still read it and a new one takes its place."""
    path.replace(path.with_name(f"{path.name}.damaged"))
    for beside in ("-wal", "-shm"):
        path.with_name(path.name + beside).unlink(missing_ok=True)


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
