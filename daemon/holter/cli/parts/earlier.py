"""The memory of a project, for runs that holter watches and for logs of runs that it did not.

A coordinator reads it once when it starts, searches it when an incident opens, and writes incidents as they are
explained. `holter diagnose` searches it, and writes to it with --remember.
"""

import logging
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holter.cli.parts.evidence import settings_of
from holter.coordinator.identity import RunIdentity
from holter.diagnosis.explain import strike_out
from holter.errors import UsageError
from holter.offline.found import Found
from holter.offline.proof.memory import MAX_STRIKES, NAME, MemoryEntry, MemoryFile, recall
from holter.offline.proof.record import fault_of
from holter.records import Diagnosis

logger = logging.getLogger(__name__)

OFF = frozenset({"off", "0", "none", "no"})
RUNS = "holter-runs"
MAX_SETTINGS = 400
"""Largest number of a log's settings that are remembered, to be compared with the next log's."""


def memory_path(runs: Path, setting: str) -> Path | None:
    """Return the path of the memory: what HOLTER_MEMORY says, else beside the run directories; None if there is none."""
    if setting.lower() in OFF:
        return None
    if setting:
        return Path(setting).expanduser().absolute()
    try:
        # In /tmp anybody could have put a file of this name.
        is_everybodys = bool(runs.stat().st_mode & stat.S_IWOTH)
    except OSError:
        is_everybodys = False
    return None if is_everybodys else runs.absolute() / NAME


def project_of(runs: Path) -> str:
    """Return the project's name: the folder that holds the run directories. `holter-runs` itself is skipped, because it names nothing."""
    runs = runs.absolute()
    return runs.parent.name if runs.name == RUNS else runs.name


def entry_of(diagnosis: Diagnosis, project: str, run: str, settings: dict[str, str]) -> MemoryEntry:
    """Return an incident as an entry of the memory."""
    fault = fault_of(diagnosis)
    return MemoryEntry(
        key=f"{run}/{diagnosis.id}", at=diagnosis.opened_at, project=project, run=run, incident=diagnosis.id, cause=fault.cause, place=fault.place,
        severity=fault.severity, symptom=fault.symptom, step=fault.first_step, fix=fault.fix, settings=settings,
    )  # fmt: skip


def recalled(diagnosis: Diagnosis, now: MemoryEntry, entries: Sequence[MemoryEntry]) -> Diagnosis:
    """Add what the memory knows of a diagnosis; if three fixes did not hold, its alternatives are put first."""
    known = recall(entries, now)
    if not known.seen and not known.notes and not known.tried and not known.solved_by:
        return diagnosis
    diagnosis = msgspec.structs.replace(diagnosis, seen_before=known.sentences())
    strikes = diagnosis.strikes + len(known.attempts)
    if strikes < MAX_STRIKES or not known.attempts:
        return msgspec.structs.replace(diagnosis, strikes=strikes)
    return strike_out(diagnosis, strikes, known.lessons(now.cause))


class LogMemory:
    """The memory of a project, for what runs without holter left behind."""

    def __init__(self, file: MemoryFile, project: str) -> None:
        self.file, self._project = file, project

    def entry(self, diagnosis: Diagnosis, found: Found) -> MemoryEntry:
        """Return the entry of a diagnosis from a log; examined twice, it keeps the same key."""
        run = str(Path(diagnosis.run_id).absolute())
        settings = {f"{Path(config.file).name}: {name}": value for name, value, config in found.settings()}
        made = entry_of(diagnosis, self._project, run, dict(list(settings.items())[:MAX_SETTINGS]))
        return msgspec.structs.replace(made, key=f"{run}/{made.cause}/{made.place}")

    def recall(self, diagnoses: Sequence[Diagnosis], found: Found) -> list[Diagnosis]:
        """Add to each diagnosis what the memory knows of it. Raises UsageError."""
        entries = self.file.entries()
        return [recalled(one, self.entry(one, found), entries) if one.causes else one for one in diagnoses]

    def remember(self, diagnoses: Sequence[Diagnosis], found: Found) -> int:
        """Write the diagnoses to the memory and return how many were written. Raises UsageError."""
        made = [self.entry(one, found) for one in diagnoses if one.causes]
        if made:
            self.file.put(made)
        return len(made)


def memory_of_logs(setting: str) -> LogMemory | None:
    """Return the memory of the current folder; None if there is none."""
    path = memory_path(Path(RUNS), setting)
    return LogMemory(MemoryFile(path), project_of(Path(RUNS))) if path is not None else None


def earlier_runs(run_dir: Path, setting: str) -> "ProjectMemory | None":
    """Return the memory for a watched run; None if there is none.

    If it cannot be read, the log says so and the run goes on without.
    """
    path = memory_path(run_dir.parent, setting)
    if path is None:
        return None
    memory = ProjectMemory(MemoryFile(path), project_of(run_dir.parent))
    memory.load()
    return memory


class ProjectMemory:
    """The memory of a project as the coordinator uses it."""

    def __init__(self, file: MemoryFile, project: str) -> None:
        self._file, self._project = file, project
        self._entries: list[MemoryEntry] = []
        self._has_failed = False

    def load(self) -> None:
        """Read the file; never raises."""
        try:
            self._entries = self._file.entries()
        except UsageError as error:
            self._say(str(error))
        for remark in self._file.remarks:
            self._say(remark)

    def recall(self, diagnosis: Diagnosis, identity: RunIdentity) -> Diagnosis:
        """Add what the memory knows of a diagnosis; if three fixes did not hold, its alternatives are put first."""
        now = entry_of(diagnosis, self._project, identity.run_id, settings_of(msgspec.to_builtins(identity)))
        return recalled(diagnosis, now, self._entries)

    def remember(self, diagnosis: Diagnosis, identity: RunIdentity) -> None:
        """Write a diagnosis to the memory; that the file cannot be written is logged once."""
        entry = entry_of(diagnosis, self._project, identity.run_id, settings_of(msgspec.to_builtins(identity)))
        try:
            self._file.put([entry])
        except UsageError as error:
            self._say(str(error))

    def _say(self, sentence: str) -> None:
        if not self._has_failed:
            logger.warning("%s", sentence)
        self._has_failed = True
