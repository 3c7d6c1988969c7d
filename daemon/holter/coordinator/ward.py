"""Everything the coordinator knows and concludes, without a socket: told what arrives and what time it is, it answers what to do.

hear   ->  roster, assembly, journal
judge  ->  findings -> tables to fetch | diagnoses to store and tell
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holter import clock
from holter.coordinator import identity
from holter.coordinator.assembly import Assembly
from holter.coordinator.casebook import Casebook, cause_of
from holter.coordinator.disk import Disk, write_atomically
from holter.coordinator.incidents import Incidents
from holter.coordinator.journal import Journal
from holter.coordinator.judging import Bench
from holter.coordinator.recalling import Recalled, is_interrupted, recall
from holter.coordinator.roster import Roster
from holter.coordinator.rounds import Rounds
from holter.detectors import ALL, Detector, TableKey
from holter.records import (
    Action,
    Attached,
    Diagnosis,
    Exited,
    Feed,
    Finding,
    Inspection,
    Judged,
    Observation,
    Own,
    Skipped,
    StepDone,
    Swapped,
    Table,
    Unavailable,
)
from holter.transport import wire

logger = logging.getLogger(__name__)

RECALL_DEADLINE_S = 5.0
"""For a coordinator that is started again to read its own journal."""
RETURN_NS = 3 * 10**9
"""So long its sidecars are given to come back before anything is judged: what they have to say lies in between."""
URGENT_SKIPS = 16
"""A loss scaler that let no step happen so often in a row is judged at once."""


@dataclass(frozen=True)
class WardSettings:
    """Which run is watched, and where it is written down."""

    run_dir: Path
    run_id: str
    address: str
    """`http://host:port`"""
    world_size: int = 0
    """0: what the first sidecar says."""
    action: Action = "halt"
    """The most that may be done about a diagnosis."""
    journal_bytes: int = 64 * 2**20
    """Size of the journal in all."""


@dataclass(frozen=True)
class Judgement:
    """What one look at everything showed."""

    needs: tuple[TableKey, ...]
    """Tables to fetch before some of it can be explained."""
    fresh: tuple[Diagnosis, ...]
    """Incidents that nobody has been told of."""


class Ward:
    """One run under observation."""

    def __init__(self, settings: WardSettings, detectors: Sequence[Detector] = ALL) -> None:
        self.settings = settings
        self.disk = Disk()
        self.roster = Roster(settings.world_size)
        self.assembly = Assembly(settings.world_size)
        self.journal = Journal(settings.run_dir / "journal", settings.journal_bytes)
        self.incidents = Incidents(settings.run_dir, self.disk)
        self.incidents.load()
        self.casebook = Casebook(settings.run_id, settings.action, self.incidents.all())
        self.rounds = Rounds(self.assembly, self.casebook, detectors)
        self.findings: list[Finding] = []
        """What stands as of the last judgement."""
        self.strangers = 0
        """Observations that spoke for another rank than their sender's."""
        self.introductions = identity.Introductions(
            settings.run_id, settings.world_size, clock.wall_ns(), settings.address
        )
        self._is_identity_written = False
        self._told: set[tuple[str, str]] = set()
        self._has_news = False
        """Something was heard since the last judgement."""
        self._silent_until_ns = 0

    @property
    def bench(self) -> Bench:
        """The detectors, and how each is doing."""
        return self.rounds.bench

    def hear(self, rank: int, report: wire.Report, now_ns: int) -> bool:
        """Take a report in; True when it is urgent to judge."""
        member = self.roster.members[rank]
        member.last_heard_ns = now_ns
        member.dropped = max(member.dropped, report.dropped)
        if report.heartbeat is not None:
            self.roster.beat(rank, report.heartbeat, now_ns)
        is_urgent = False
        for observation in report.observations:
            if observation.rank != rank or observation.step < -1 or isinstance(observation.body, Own):
                self.strangers += 1
                continue
            self._take(observation, now_ns)
            is_urgent = is_urgent or _is_urgent(observation)
        return is_urgent

    def hear_table(self, key: TableKey, answer: Observation | None, now_ns: int) -> None:
        """The answer to a Fetch: the table that was asked for, or the news that it is not to be had."""
        if answer is not None and _is_answer(key, answer):
            self._take(answer, now_ns)
        else:
            tensor_class, step, rank = key
            self._note(
                Observation(rank=rank, step=step, at_ns=now_ns, body=Unavailable(tensor_class=tensor_class)), now_ns
            )

    def judge(self, now_ns: int, *, is_final: bool = False) -> Judgement:
        """Look at everything; explain what can be explained, and say which tables the rest waits for."""
        if now_ns < self._silent_until_ns and not is_final:
            return Judgement((), ())
        seen = self.rounds.make(now_ns, is_final=is_final)
        if self._has_news or is_final or seen.diagnoses:
            body = Judged(is_final=is_final, is_news=bool(seen.diagnoses))
            self.journal.append(now_ns, Observation(rank=-1, step=-1, at_ns=now_ns, body=body))
            self._has_news = False
        self.findings = seen.findings
        for diagnosis in seen.diagnoses:
            self.incidents.put(diagnosis)
        return Judgement(seen.needs, tuple(diagnosis for diagnosis in seen.diagnoses if self._is_news(diagnosis)))

    def recall(self, now_ns: int) -> None:
        """Know again what a coordinator of this run wrote down before it died a moment ago; raises nothing."""
        if not is_interrupted(self.settings.run_dir, self.settings.run_id, now_ns):
            return
        self.casebook.count(())
        try:
            found = recall(self.journal.folder, self.rounds, clock.monotonic_s, RECALL_DEADLINE_S)
        except OSError as error:
            logger.warning("cannot read the journal of a former coordinator: %s", error)
            found = Recalled()
        self.casebook.count([known for known in self.incidents.all() if known.id not in found.diagnoses])
        if not found.num_entries:
            return
        self._silent_until_ns = now_ns + RETURN_NS
        for rank, attached in found.attached.items():
            self.introductions.add(rank, attached)
        for diagnosis in found.diagnoses.values():
            self._is_news(diagnosis)
            if self.incidents.get(diagnosis.id) is None:
                self.incidents.put(diagnosis)
        logger.info(
            "read %d entries of a former coordinator%s", found.num_entries, "" if found.is_complete else ", not all"
        )

    def write_down(self) -> None:
        """What arrived since the last time; many ranks that attach together make one write."""
        if not self._is_identity_written:
            self._is_identity_written = True
            self._write_identity(None)
        self.journal.flush(self.disk)

    def close(self, now_ns: int, deadline_s: float) -> None:
        """Write the end down."""
        self._write_identity(now_ns)
        self.journal.flush(self.disk, is_last=True)
        if not self.disk.close(deadline_s):
            logger.warning("gave up waiting for the disk of %s after %.0f s", self.settings.run_dir, deadline_s)

    def blind(self) -> list[str]:
        """What holter cannot see in this run."""
        return self.roster.blind() + self.bench.blind()

    def warnings(self) -> list[str]:
        """What went wrong with holter itself, or is odd about the job."""
        found = []
        if self.disk.failures:
            found.append(f"run directory: {self.disk.failures} writes failed, last {self.disk.last_failure}")
        if self.journal.dropped:
            found.append(f"journal: {self.journal.dropped} entries lost")
        if self.roster.sidecars_lost:
            found.append(f"sidecars lost: {self.roster.sidecars_lost}")
        if self.roster.duplicates:
            found.append(f"ranks that came twice: {self.roster.duplicates}")
        if self.strangers:
            found.append(f"observations that cannot be: {self.strangers}")
        return found

    def _take(self, observation: Observation, now_ns: int) -> None:
        self._note(observation, now_ns)
        self.roster.observe(observation, now_ns)
        if isinstance(observation.body, Attached):
            is_new = self.introductions.add(observation.rank, observation.body)
            self._is_identity_written = self._is_identity_written and not is_new

    def _note(self, observation: Observation, now_ns: int) -> None:
        self.assembly.add(observation, now_ns)
        self.journal.append(now_ns, observation)
        self._has_news = True

    def _write_identity(self, ended_ns: int | None) -> None:
        path, content = self.settings.run_dir / "run.json", identity.as_json(self.introductions.record(ended_ns))
        self.disk.submit(partial(write_atomically, path, content))

    def _is_news(self, diagnosis: Diagnosis) -> bool:
        """Told once for each incident and leading cause: a better explanation of the same cause is not news."""
        news = (diagnosis.id, cause_of(diagnosis))
        if news in self._told:
            return False
        self._told.add(news)
        return True


def _is_answer(key: TableKey, observation: Observation) -> bool:
    """Is this the table that was asked for, and does it add up."""
    table = observation.body
    return (
        isinstance(table, Table)
        and key == (table.tensor_class, observation.step, observation.rank)
        and len(table.names) == len(table.fingerprints)
        and all(len(beside) in (0, len(table.names)) for beside in (table.norms, table.sums, table.marks))
    )


def _is_urgent(observation: Observation) -> bool:
    match observation.body:
        case StepDone() as done:
            return bool(done.nonfinite)
        case Skipped() as skipped:
            return skipped.in_a_row >= URGENT_SKIPS
        case Feed() as feed:
            return not feed.is_end
        case Exited() | Swapped() | Inspection():
            return True
        case _:
            return False
