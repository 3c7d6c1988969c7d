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
from holter.coordinator.judging import DIAGNOSIS, Bench, pending
from holter.coordinator.roster import Roster
from holter.detectors import ALL, Detector, TableKey, Window
from holter.records import Action, Attached, Diagnosis, Exited, Finding, Observation, StepDone, Table
from holter.transport import wire

logger = logging.getLogger(__name__)

FINAL_PATIENCE_NS = 60 * 10**9
"""The last judgement is made as if so much time had passed: no one is waited for any more."""


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
        self.bench = Bench(detectors, clock.monotonic_s)
        self.findings: list[Finding] = []
        """What stands as of the last judgement."""
        self.strangers = 0
        """Observations that spoke for another rank than their sender's."""
        self.introductions = identity.Introductions(
            settings.run_id, settings.world_size, clock.wall_ns(), settings.address
        )
        self._is_identity_written = False
        self._told: set[tuple[str, str]] = set()

    def hear(self, rank: int, report: wire.Report, now_ns: int) -> bool:
        """Take a report in; True when it is urgent to judge."""
        member = self.roster.members[rank]
        member.last_heard_ns = now_ns
        member.dropped = max(member.dropped, report.dropped)
        if report.heartbeat is not None:
            self.roster.beat(rank, report.heartbeat, now_ns)
        is_urgent = False
        for observation in report.observations:
            if observation.rank != rank or observation.step < -1:
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
            self.assembly.mark_unavailable(key)

    def judge(self, now_ns: int, *, is_final: bool = False) -> Judgement:
        """Look at everything; explain what can be explained, and say which tables the rest waits for."""
        window = self.assembly.window(now_ns + FINAL_PATIENCE_NS if is_final else now_ns)
        self.findings = self.bench.judge(window)
        needs = {key for finding in self.findings for key in pending(finding, window)}
        fresh: list[Diagnosis] = []
        self.bench.guard(DIAGNOSIS, lambda: self._explain(window, now_ns, fresh))
        return Judgement(tuple(sorted(needs)), tuple(fresh))

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

    def _explain(self, window: Window, now_ns: int, fresh: list[Diagnosis]) -> None:
        for diagnosis in self.casebook.settle(self.findings, window, now_ns):
            self.incidents.put(diagnosis)
            if self._is_news(diagnosis):
                fresh.append(diagnosis)

    def _take(self, observation: Observation, now_ns: int) -> None:
        self.assembly.add(observation, now_ns)
        self.roster.observe(observation, now_ns)
        self.journal.append(now_ns, observation)
        if isinstance(observation.body, Attached):
            is_new = self.introductions.add(observation.rank, observation.body)
            self._is_identity_written = self._is_identity_written and not is_new

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
        and len(table.norms) in (0, len(table.names))
    )


def _is_urgent(observation: Observation) -> bool:
    match observation.body:
        case StepDone() as done:
            return bool(done.nonfinite)
        case Exited():
            return True
        case _:
            return False
