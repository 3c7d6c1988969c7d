"""Remembers incidents of earlier runs: what was wrong, what was tried against it, with which result, and what people noted.

    MemoryFile   SQLite, one file per project or one for all (HOLTER_MEMORY); a damaged file is put aside, a damaged row is left out
    recall       pure: what the memory knows of an incident that has just opened, and whether this is the third fix that failed

An entry is an incident, a fix that was tried, or a note. Nothing leaves the machine.
"""

import contextlib
import itertools
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from holter.errors import UsageError
from holter.files import UNREADABLE
from holter.offline.proof.changes import settings_differ

NAME = "memory.sqlite"
MAX_RECALLED = 4000
"""Number of entries that are read, the newest."""
MAX_STRIKES = 3
"""Number of occurrences from which on the diagnosis itself is in doubt, and number of failed fixes that disprove it."""
MAX_NAMED = 4
FAILED = frozenset({"not_fixed", "worse"})
Kind = Literal["incident", "fix", "note"]
_WORDS = re.compile(r"[a-z0-9_.]{3,}")
_COMMON = frozenset({"the", "and", "for", "with", "from", "set", "use", "that", "not"})


class MemoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One incident, fix or note that is remembered."""

    key: str
    """Unique key: `RUN/INCIDENT`, or a name of its own."""
    kind: Kind = "incident"
    at: str
    """Time at which it happened, as in RFC 3339."""
    project: str = ""
    run: str = ""
    incident: str = ""
    cause: str = ""
    place: str = ""
    """Module, tensor or collective, without numbers of layers."""
    severity: str = ""
    symptom: str = ""
    step: int = -1
    fix: str = ""
    """For an incident, what the diagnosis said to do; for a fix, what was done."""
    verdict: str = ""
    """What `holter verify` said of a fix: fixed, not_fixed, worse or undecided."""
    note: str = ""
    settings: dict[str, str] = {}
    """How the run was started: `command: --lr` -> `0.1`."""


class FixAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was changed against a fault which came back nevertheless."""

    what: str
    names: tuple[str, ...]
    """Settings that the attempt changed, or the words in which it was described."""
    came_back: str
    """When the fault came back, and in which run, as a sentence."""


class Recollection(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory knows about the fault of one incident."""

    seen: tuple[str, ...] = ()
    solved_by: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    """Fixes that were tried without success."""
    notes: tuple[str, ...] = ()
    attempts: tuple[FixAttempt, ...] = ()
    """Attempts in order; each was followed by the same fault."""

    @property
    def strikes(self) -> int:
        """How often the fault occurred, where only occurrences with a change in between count."""
        return 1 + len(self.attempts)

    def sentences(self) -> tuple[str, ...]:
        """Return the sentences for the report: seen before on …, solved by …; tried without success: …."""
        made = [f"Seen before on {'; '.join(self.seen[-MAX_NAMED:])}."] if self.seen else []
        made += [f"Solved then by: {one}." for one in self.solved_by[-MAX_NAMED:]]
        made += [f"Tried without success: {one}." for one in self.tried[-MAX_NAMED:]]
        return (*made, *(f"Noted: {one}" for one in self.notes[-MAX_NAMED:]))

    def lessons(self, cause: str) -> str:
        """Return what the attempts taught, and which assumption they share."""
        taught = "; ".join(
            f"{number}. {one.what}: {one.came_back}" for number, one in enumerate(self.attempts, start=1)
        )
        num = len(self.attempts)
        before = " Before a third fix is tried:" if num < MAX_STRIKES else ""
        return f"Stop: {cause} came back after {num} fix{'es' if num > 1 else ''} ({taught}).{before} {shared_assumption(self.attempts, cause)}"


def shared_assumption(attempts: Sequence[FixAttempt], cause: str) -> str:
    """Return what all attempts have in common, and so what none of them has questioned."""
    common = set.intersection(*(set(one.names) for one in attempts)) if attempts else set()
    if common:
        return f"All of them changed {', '.join(sorted(common))}: they assume that the fault lies there."
    return f"What they share is the diagnosis itself, that this is {cause}: put that in question first."


def recall(entries: Iterable[MemoryEntry], now: MemoryEntry) -> Recollection:
    """Return what is known of the same cause, in the same place of the same project, from other runs than `now`'s."""
    known = sorted((one for one in entries if is_same_fault(one, now) and one.key != now.key), key=lambda one: one.at)
    others = [one for one in known if one.kind == "incident" and one.run != now.run]
    fixes = [one for one in known if one.kind == "fix"]
    return Recollection(
        seen=tuple(dict.fromkeys(_seen(one) for one in others)),
        solved_by=tuple(dict.fromkeys(one.fix for one in fixes if one.verdict == "fixed")),
        tried=tuple(dict.fromkeys(one.fix for one in fixes if one.verdict in FAILED)),
        notes=tuple(one.note for one in known if one.note),
        attempts=tuple(_attempts([*_first_of_each_run(others), now], fixes)),
    )


def is_same_fault(one: MemoryEntry, other: MemoryEntry) -> bool:
    """Whether cause, place and project are the same; an unknown place fits all."""
    return (
        one.cause == other.cause
        and one.project == other.project
        and (one.place == other.place or not (one.place and other.place))
    )


def _first_of_each_run(incidents: Sequence[MemoryEntry]) -> list[MemoryEntry]:
    return list({one.run: one for one in reversed(incidents)}.values())[::-1]


def _attempts(runs: Sequence[MemoryEntry], fixes: Sequence[MemoryEntry]) -> Iterator[FixAttempt]:
    """Yield the attempts between runs with the fault: fixes that `verify` saw fail, else the last noted fix, else the changed settings.

    Starting the same thing again is no attempt.
    """
    known = {one.run for one in runs}
    for before, after in itertools.pairwise(runs):
        told = [one for one in fixes if one.fix and (one.run == before.run or (one.run not in known and before.at <= one.at <= after.at))]  # fmt: skip
        tried = [one for one in told if one.verdict in FAILED] or told[-1:]
        last = tried[-1] if tried else None
        for one in tried[:-1]:
            yield FixAttempt(what=one.fix, names=tuple(sorted(set(words(one.fix)))), came_back=f"it came back after {one.run or 'a run'}")  # fmt: skip
        changes = settings_differ(before.settings, after.settings)
        if last is None and not changes:
            continue
        what = last.fix if last else ", ".join(change.text() for change in changes[:MAX_NAMED])
        names = {change.name for change in changes} or set(words(last.fix if last else ""))
        at = f" at step {after.step}" if after.step >= 0 else ""
        yield FixAttempt(what=what, names=tuple(sorted(names)), came_back=f"it came back{at} in {after.run}")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without common ones, for searching and comparing."""
    return [word for word in _WORDS.findall(text.lower()) if word not in _COMMON]


def _seen(one: MemoryEntry) -> str:
    at = f", step {one.step}" if one.step >= 0 else ""
    return f"{one.at[:10]} in {one.run or one.key}{at}"


def search(entries: Iterable[MemoryEntry], text: str) -> list[MemoryEntry]:
    """Return the entries in which most of the words occur, the best first; every entry for an empty text."""
    wanted = words(text)
    scored = [(sum(word in _text(one) for word in wanted), one.at, one) for one in entries]
    least = (len(wanted) + 1) // 2
    return [one for score, _, one in sorted(scored, key=lambda row: row[:2], reverse=True) if score >= least]


def _text(one: MemoryEntry) -> str:
    return f"{one.key} {one.project} {one.cause} {one.place} {one.symptom} {one.fix} {one.verdict} {one.note}".lower()


class MemoryFile:
    """The file of the memory; every call opens it anew, so that several processes may write to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.remarks: list[str] = []
        """One sentence for each problem with the file, such as unreadable entries."""

    def entries(self) -> list[MemoryEntry]:
        """Return the newest entries, oldest first; raise UsageError if the file cannot be read.

        Unreadable rows are left out and counted in a remark.
        """
        if not self.path.exists():
            return []
        try:
            with self._open() as connection:
                connection.text_factory = bytes
                rows = connection.execute(
                    "SELECT content FROM memories ORDER BY rowid DESC LIMIT ?", (MAX_RECALLED,)
                ).fetchall()
        except sqlite3.OperationalError as error:
            raise UsageError(f"the memory {self.path} cannot be read: {error}") from None
        except sqlite3.DatabaseError:
            self._put_aside()
            return []
        decoded = [_decoded(content) for (content,) in rows]
        if lost := decoded.count(None):
            self.remarks.append(f"{lost} entries of the memory {self.path} cannot be read and are left out")
        return sorted((one for one in decoded if one is not None), key=lambda one: one.at)

    def put(self, entries: Iterable[MemoryEntry]) -> None:
        """Add these entries, replacing those with the same key; raise UsageError if that fails."""
        rows = [(one.key, msgspec.json.encode(one)) for one in entries]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._write(rows)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                self._put_aside()
                self._write(rows)
        except (OSError, sqlite3.Error) as error:
            raise UsageError(f"the memory {self.path} cannot be written: {error}") from None

    def _write(self, rows: list[tuple[str, bytes]]) -> None:
        with self._open() as connection:
            connection.executemany(
                "INSERT INTO memories VALUES (?, ?) ON CONFLICT(key) DO UPDATE SET content = excluded.content", rows
            )

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if not self.path.exists():
            self.path.touch(mode=0o600)
        with contextlib.closing(sqlite3.connect(self.path, timeout=5.0)) as connection, connection:
            connection.execute("CREATE TABLE IF NOT EXISTS memories (key TEXT PRIMARY KEY, content BLOB NOT NULL)")
            yield connection

    def _put_aside(self) -> None:
        """Keep a file that is no database under another name, because somebody may still read it."""
        for number in range(1, 1000):
            aside = self.path.with_name(f"{self.path.name}.damaged-{number}")
            if not aside.exists():
                with contextlib.suppress(OSError):
                    self.path.rename(aside)
                break
        self.remarks.append(f"the memory {self.path} was damaged; it is kept as {aside.name}, and a new one is begun")


def _decoded(content: object) -> MemoryEntry | None:
    try:
        return msgspec.json.decode(content if isinstance(content, bytes) else b"", type=MemoryEntry)
    except UNREADABLE:
        return None


TITLE = "# holter memory"
_FIELDS = tuple(name for name in MemoryEntry.__struct_fields__ if name != "settings")


def to_markdown(entries: Iterable[MemoryEntry]) -> str:
    """Write every entry with every field that is set, for people and for `holter memory import`."""
    parts = [TITLE, ""]
    for one in entries:
        parts += [f"## {one.at[:10]} {one.cause or one.kind}", ""]
        parts += [
            f"- {name}: {_escaped(str(value))}" for name in _FIELDS if (value := getattr(one, name)) not in {"", -1}
        ]
        parts += [f"- setting {_escaped(name)} = {_escaped(value)}" for name, value in one.settings.items()]
        parts.append("")
    return "\n".join(parts)


def from_markdown(text: str) -> list[MemoryEntry]:
    """Read what `to_markdown` wrote, perhaps edited by people; raise UsageError, which names the line."""
    made: list[MemoryEntry] = []
    values: dict[str, str] = {}
    settings: dict[str, str] = {}
    for number, line in enumerate([*text.splitlines(), "## "], start=1):
        if line.startswith("## "):
            if values or settings:
                made.append(_made(values, settings, number))
            values, settings = {}, {}
        elif line.startswith("- setting "):
            name, _, value = line.removeprefix("- setting ").partition(" = ")
            settings[_unescaped(name)] = _unescaped(value)
        elif line.startswith("- "):
            name, _, value = line[2:].partition(": ")
            values[name.strip()] = _unescaped(value)
    return made


def _made(values: Mapping[str, str], settings: dict[str, str], line: int) -> MemoryEntry:
    known = {name: value for name, value in values.items() if name in _FIELDS}
    try:
        return msgspec.convert({**known, "settings": settings}, MemoryEntry, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"the entry that ends before line {line} cannot be read: {str(error)[:1].lower()}{str(error)[1:]}"
        ) from None


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace(" = ", " \\= ")


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "r": "\r"}.get(found.group(1), found.group(1)), text)
