"""Everything the coordinator knows and concludes, without a socket: told what arrives and what time it is, it answers what to do.

hear   ->  roster, assembly, journal, halts
judge  ->  findings -> tables to fetch | diagnoses to store and tell | a halt to carry on with
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from holter import clock
from holter.coordinator import identity
from holter.coordinator.disk import Disk
from holter.coordinator.halt import situation
from holter.coordinator.halt.attempts import Act, Attempt, View
from holter.coordinator.halt.driver import HaltDriver
from holter.coordinator.halt.script_saves import SaveBook, compared_until, reported_until
from holter.coordinator.halt.sealing import HaltEnding, SealedHalt
from holter.coordinator.incidents.store import Incidents
from holter.coordinator.incidents.tracker import IncidentTracker, cause_of
from holter.coordinator.judge import DetectorRunner
from holter.coordinator.recovery.journal import Journal
from holter.coordinator.recovery.recovery import Recovered, is_interrupted, recall
from holter.coordinator.roster import Roster
from holter.coordinator.rounds import JudgingRounds
from holter.coordinator.urgency import is_answer, is_sound, is_urgent
from holter.coordinator.window.assembly import Assembly
from holter.exporters.webhook import Deliveries
from holter.faults import ALL, Detector, ExamKey, TableKey
from holter.files import write_whole
from holter.halting.protocol import SETTLED
from holter.halting.vault.manifest import Circumstances
from holter.halting.verdicts import Sight
from holter.records import (
    Action,
    Attached,
    Body,
    Diagnosis,
    Finding,
    Groups,
    Halting,
    Judged,
    Link,
    Observation,
    Order,
    Own,
    Unavailable,
    Unexamined,
)
from holter.transport import wire

logger = logging.getLogger(__name__)

RECALL_DEADLINE_S = 5.0
"""For a coordinator that is started again to read its own journal."""
RETURN_NS = 3 * 10**9
"""So long its sidecars are given to come back before anything is judged: what they have to say lies in between."""
JOURNAL_BYTES_OF_RANK = 16 * 2**10
EXAM_PATIENCE_NS = 6 * 10**9
"""So long a sidecar may take to examine its rank."""
ASKED_NS = 600 * 10**9
"""So long it is remembered that it was asked: by then it has answered, or it is noted that it has not."""


@dataclass(frozen=True)
class RunSettings:
    """Which run is watched, and where it is written down."""

    run_dir: Path
    run_id: str
    address: str
    """`http://host:port`"""
    world_size: int = 0
    """0: what the first sidecar says."""
    action: Action = "halt"
    """The most that may be done about a diagnosis."""
    save_deadline_s: float = 300.0
    """So long a save may take in a halt."""
    journal_bytes: int = 64 * 2**20
    """Size of the journal in all; more for thousands of ranks, so that it holds a look at each of them."""


@dataclass(frozen=True)
class Judgement:
    """What one look at everything showed."""

    needs: tuple[TableKey, ...]
    """Tables to fetch before some of it can be explained."""
    exams: tuple[ExamKey, ...]
    """Ranks to examine, likewise; each is asked once."""
    fresh: tuple[Diagnosis, ...]
    """Incidents that nobody has been told of."""
    alarms: tuple[str, ...] = ()
    """Sentences that cannot wait: the latest checkpoint is poisoned."""
    acts: tuple[Act, ...] = ()
    """What a halt asks for, in order."""
    told: tuple[str, ...] = ()
    """How it goes with the halt, for the job's own log."""


class Run:
    """One run under observation."""

    def __init__(self, settings: RunSettings, detectors: Sequence[Detector] = ALL) -> None:
        self.settings = settings
        self.disk = Disk()
        self.roster = Roster(settings.world_size)
        self.assembly = Assembly(settings.world_size)
        journal_bytes = max(settings.journal_bytes, settings.world_size * JOURNAL_BYTES_OF_RANK)
        self.journal = Journal(settings.run_dir / "journal", journal_bytes)
        self.incidents = Incidents(settings.run_dir, self.disk)
        self.incidents.load()
        self.casebook = IncidentTracker(settings.run_id, settings.action, self.incidents.all())
        self.rounds = JudgingRounds(self.assembly, self.casebook, detectors)
        self.saves = SaveBook(settings.run_dir, self.disk)
        self.halts = HaltDriver(self._write_own, settings.save_deadline_s)
        self.findings: list[Finding] = []
        """What stands as of the last judgement."""
        self.left_open: list[Diagnosis] = []
        """Incidents that a former life of this run left open."""
        self.deliveries = Deliveries()
        """What became of messages to the webhook; nothing, if there is none."""
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
        self._links: dict[int, str] = {}
        """Rank -> what was last written down of its line."""
        self._mesh: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        """Description of process groups -> the ranks of each."""
        self._asked: dict[ExamKey, int] = {}
        """Examinations -> when they were first asked for."""

    @property
    def bench(self) -> DetectorRunner:
        """The detectors, and how each is doing."""
        return self.rounds.bench

    def connect(self, hello: wire.Hello, now_ns: int) -> int:
        """A sidecar is on the line; returns the number of its connection."""
        known = self.roster.members.get(hello.rank)
        if known is not None and known.hello.rank_pid != hello.rank_pid:
            self.halts.forget(hello.rank)
        connection = self.roster.connect(hello, now_ns)
        self._note_link(hello.rank, now_ns)
        return connection

    def disconnect(self, rank: int, connection: int, now_ns: int, *, is_closed: bool) -> None:
        """A line ended, closed by the other side or given up."""
        self.roster.disconnect(rank, connection, is_closed=is_closed)
        self._note_link(rank, now_ns)

    def hear_sign(self, rank: int, now_ns: int) -> None:
        """A sidecar spoke, whatever it said."""
        self.roster.hear(rank, now_ns)
        self._note_link(rank, now_ns)

    def hear(self, rank: int, report: wire.Report, now_ns: int) -> bool:
        """Take a report in; True when it is urgent to judge."""
        self.hear_sign(rank, now_ns)
        member = self.roster.members[rank]
        member.dropped = max(member.dropped, report.dropped)
        if report.heartbeat is not None:
            self.roster.beat(rank, report.heartbeat, now_ns)
        has_urgent = False
        for observation in report.observations:
            body = observation.body
            if observation.rank != rank or observation.step < -1 or isinstance(body, Own) or not is_sound(body):
                self.strangers += 1
                continue
            self._take(observation, now_ns)
            has_urgent = has_urgent or is_urgent(observation)
        return has_urgent

    def hear_table(self, key: TableKey, answer: Observation | None, now_ns: int) -> None:
        """The answer to a Fetch: the table that was asked for, or the news that it is not to be had."""
        if answer is not None and is_answer(key, answer):
            self._take(answer, now_ns)
        else:
            tensor_class, step, rank = key
            self._note(
                Observation(rank=rank, step=step, at_ns=now_ns, body=Unavailable(tensor_class=tensor_class)), now_ns
            )

    def judge(self, now_ns: int, *, is_final: bool = False) -> Judgement:
        """Look at everything; explain what can be explained, and say which tables the rest waits for."""
        if now_ns < self._silent_until_ns and not is_final:
            return Judgement((), (), ())
        for rank in self.roster.look(now_ns):
            self._note_link(rank, now_ns)
        seen = self.rounds.make(now_ns, is_final=is_final)
        self.roster.compare(self.assembly.arrivals())
        if self._has_news or is_final or seen.diagnoses:
            closed = tuple(diagnosis.id for diagnosis in seen.diagnoses if diagnosis.closed_at is not None)
            body = Judged(is_final=is_final, is_news=bool(seen.diagnoses), closed=closed)
            self.journal.append(now_ns, Observation(rank=-1, step=-1, at_ns=now_ns, body=body))
            self._has_news = False
        if seen.diagnoses:
            # Before the incident itself: a coordinator that dies now knows it again by this.
            self.journal.flush(self.disk, is_now=True)
        self.findings = seen.findings
        alarms = self.saves.judge(seen.findings, seen.diagnoses, lambda: self._sight(now_ns))
        for diagnosis in seen.diagnoses:
            self._put(diagnosis)
        exams = tuple(key for key in seen.exams if self._is_to_ask(key, now_ns))
        self._forget_asked(now_ns)
        fresh = tuple(diagnosis for diagnosis in seen.diagnoses if self._is_news(diagnosis))
        acts = () if is_final else tuple(self.halts.look(now_ns, self._view(now_ns)))
        told, self.halts.sentences = tuple(self.halts.sentences), []
        return Judgement(seen.needs, exams, fresh, tuple(alarms), acts, told)

    def ending(self, order: Order) -> HaltEnding:
        """What a halt's checkpoint is sealed with."""
        attempt = self.halts.attempt
        assert attempt is not None
        verdict = self.saves.verdict_of(attempt.plan.kept, self._compared_until())
        about = Circumstances(
            run_id=self.settings.run_id,
            step=order.base_step + attempt.plan.kept,
            world_size=self.roster.world_size,
            savers=order.savers,
            lost=order.lost,
            failures=dict(attempt.failures),
            cause=attempt.wish.cause,
            verdict=verdict.verdict,
            why=verdict.why,
            mesh={name: [list(ranks) for ranks in sorted(found)] for name, found in self._mesh.items()},
        )
        return HaltEnding(
            run_dir=self.settings.run_dir,
            partial=Path(order.directory),
            about=about,
            ranks=attempt.wish.ranks,
            incident=attempt.wish.incident,
            reason=attempt.wish.reason,
            last_healthy=self.saves.last_healthy(),
            unheard=tuple(rank for rank in order.savers if self._is_unheard(rank, attempt)),
        )

    def _is_unheard(self, rank: int, attempt: Attempt) -> bool:
        member = self.roster.members.get(rank)
        has_answered = attempt.halt is not None and attempt.halt.heard.get(rank) in SETTLED
        return not has_answered and member is not None and member.exited is None

    def sealed(self, kept: SealedHalt) -> None:
        """A halt has kept what could be kept."""
        if kept.sealed is not None:
            self.saves.note_sealed(kept.sealed)
        self.halts.sealed(kept.outcome)
        attempt = self.halts.attempt
        known = self.incidents.get(attempt.wish.incident) if attempt is not None and attempt.wish.incident else None
        if known is not None:
            self._put(known)

    def recall(self, now_ns: int) -> None:
        """Know again what a coordinator of this run wrote down before it died a moment ago; raises nothing. What is of a former life is over."""
        self._recall(now_ns)
        self.left_open = self.incidents.close_former(now_ns)

    def _recall(self, now_ns: int) -> None:
        if not is_interrupted(self.settings.run_dir, self.settings.run_id, now_ns):
            return
        self.casebook.count(())
        try:
            found = recall(self.journal.folder, self.rounds, clock.monotonic_s, RECALL_DEADLINE_S)
        except OSError as error:
            logger.warning("cannot read the journal of a former coordinator: %s", error)
            found = Recovered()
        self.casebook.count([known for known in self.incidents.all() if known.id not in found.diagnoses])
        if not found.num_entries:
            return
        self._silent_until_ns = now_ns + RETURN_NS
        for observation in found.begun.values():
            self.saves.hear(observation)
        self.saves.recall(found.diagnoses.values())
        for observation in found.halting:
            self.saves.hear(observation)
            self.halts.hear(observation, now_ns)
        everyone = frozenset(range(self.settings.world_size or self.roster.world_size))
        self.halts.recall(found.orders, everyone, now_ns, found.asked)
        for rank, attached in found.attached.items():
            self.introductions.add(rank, attached)
        self.incidents.meet_again(found.diagnoses)
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

    def end(self, now_ns: int) -> None:
        """Write the end down; nothing is written afterwards, for a new life of the run may have begun."""
        self._write_identity(now_ns)
        self.journal.flush(self.disk, is_now=True)

    def close(self, deadline_s: float) -> None:
        """Wait for the disk."""
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
        return found + self.deliveries.warnings()

    def _sight(self, now_ns: int) -> Sight:
        until_step = reported_until(self.assembly.window(now_ns).steps)
        return Sight(until_step=until_step, compared_until=self._compared_until(), blind=tuple(self.blind()))

    def _compared_until(self) -> int | None:
        return compared_until(self.assembly.classes(), self.saves.diagnoses)

    def _take(self, observation: Observation, now_ns: int) -> None:
        self._note(observation, now_ns)
        self.roster.observe(observation, now_ns)
        self.saves.hear(observation)
        if isinstance(observation.body, Halting):
            self.halts.hear(observation, now_ns)
        elif isinstance(observation.body, Groups):
            for group in observation.body.groups:
                self._mesh[group.description or group.name].add(group.ranks)
        elif isinstance(observation.body, Attached):
            is_new = self.introductions.add(observation.rank, observation.body)
            self._is_identity_written = self._is_identity_written and not is_new

    def _put(self, diagnosis: Diagnosis) -> None:
        self.incidents.put(self.halts.named(self.saves.named(diagnosis)))

    def _view(self, now_ns: int) -> View:
        window = cache(lambda: self.assembly.window(now_ns))
        return View(
            whereabouts=lambda: situation.whereabouts(self.roster, window(), self.halts),
            wish=lambda: situation.wish(self.saves.diagnoses, self.findings, window),
            suspicion=lambda: situation.suspicion(self.saves.diagnoses),
            job=lambda: situation.job(window(), self.roster),
        )

    def _write_own(self, body: Body, now_ns: int) -> None:
        """What the coordinator itself does in a halt: on its way to the disk before anybody is told."""
        self.journal.append(now_ns, Observation(rank=-1, step=-1, at_ns=now_ns, body=body))
        self.journal.flush(self.disk, is_now=True)

    def _note(self, observation: Observation, now_ns: int) -> None:
        self.assembly.add(observation, now_ns)
        self.journal.append(now_ns, observation)
        self._has_news = True

    def _note_link(self, rank: int, now_ns: int) -> None:
        """Write down how a line is, if that is new; the end of one that said Goodbye is not."""
        member = self.roster.members[rank]
        if self._links.get(rank) != member.link and not member.has_said_goodbye:
            self._links[rank] = member.link
            self._note(Observation(rank=rank, step=-1, at_ns=now_ns, body=Link(state=member.link)), now_ns)

    def _is_to_ask(self, key: ExamKey, now_ns: int) -> bool:
        """Once; a sidecar that does not answer in time, or is not there, is noted."""
        asked_ns = self._asked.setdefault(key, now_ns)
        member = self.roster.members.get(key.rank)
        is_there = member is not None and member.is_connected and not member.is_silent
        if not is_there or now_ns - asked_ns > EXAM_PATIENCE_NS:
            missed = Observation(rank=key.rank, step=-1, at_ns=now_ns, body=Unexamined(asked_ns=key.asked_ns))
            self._note(missed, now_ns)
            return False
        return asked_ns == now_ns

    def _forget_asked(self, now_ns: int) -> None:
        """What was asked long ago; in order of asking."""
        while self._asked and now_ns - next(iter(self._asked.values())) > ASKED_NS:
            del self._asked[next(iter(self._asked))]

    def _write_identity(self, ended_ns: int | None) -> None:
        path, content = self.settings.run_dir / "run.json", identity.as_json(self.introductions.record(ended_ns))
        self.disk.submit(partial(write_whole, path, content))

    def _is_news(self, diagnosis: Diagnosis) -> bool:
        """Told once for each incident and leading cause: a better explanation of the same cause is not news."""
        news = (diagnosis.id, cause_of(diagnosis))
        if news in self._told:
            return False
        self._told.add(news)
        return True
