"""Takes in every message of the sidecars: checks it, keeps it, and passes it on.

    message ──▶ Roster (who is there), Assembly (what detectors see), Journal (what a replay reads)
            ──▶ CheckpointVerdicts (a save was finished), HaltDriver (a rank's part in a halt)

No socket is touched: the transport says what came, and when.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

from holter import clock
from holter.coordinator.disk import Disk
from holter.coordinator.halt.checkpoint_verdicts import CheckpointVerdicts
from holter.coordinator.halt.driver import HaltDriver
from holter.coordinator.identity import Introductions, RunSettings
from holter.coordinator.recovery.journal import Journal
from holter.coordinator.roster import Roster, digest_of
from holter.coordinator.window.assembly import Assembly
from holter.coordinator.window.wall_time import RanksSeen, WallTime
from holter.faults import ExamKey, TableKey
from holter.files import as_json, write_whole
from holter.records import (
    Attached,
    Body,
    Consumed,
    Exam,
    Groups,
    Halting,
    Link,
    Observation,
    Overdue,
    Own,
    Seated,
    StepsDone,
    Table,
    Unavailable,
    Unexamined,
)
from holter.records.goodput import GOODPUT
from holter.records.urgent import is_urgent
from holter.transport import wire

JOURNAL_BYTES_OF_RANK = 16 * 2**10
SEATED_OF_RANK = 16
"""Number of a rank's sidecars that are journalled, on average: one that comes with new keys all day must not fill the
journal."""
EXAM_PATIENCE_NS = 6 * 10**9
"""Nanoseconds that a sidecar may take to examine its rank."""
ASKED_NS = 600 * 10**9
"""Nanoseconds for which a request for an examination is remembered; by then it was answered or noted as missing."""
MAX_GROUPS = 65_536
"""Largest number of process groups in the mesh, from all ranks together."""
LONGEST_S = 1e9
"""Longest wait of a rank in seconds that is believed."""


class Intake:
    """The receiver of the transport's messages: `connect`, `hear` and so on, each with the coordinator's time."""

    def __init__(self, settings: RunSettings, disk: Disk, checkpoints: CheckpointVerdicts, halts: HaltDriver) -> None:
        self.roster = Roster(settings.world_size)
        self.assembly = Assembly(settings.world_size)
        journal_bytes = max(settings.journal_bytes, settings.world_size * JOURNAL_BYTES_OF_RANK)
        self.journal = Journal(settings.run_dir / "journal", journal_bytes)
        self.introductions = Introductions(settings.run_id, settings.world_size, clock.wall_ns(), settings.address)
        self.wall_time = WallTime(clock.wall_ns(), lambda: checkpoints.base_step)
        self.strangers = 0
        """Number of observations that spoke for another rank than the sender's, or cannot be true."""
        self.mesh: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        """For each description of process groups, the ranks of each group."""
        self.taken: int | None = None
        """Position up to which the network's stream was read; None if not known, or if this coordinator starts anew."""
        self.num_lost = 0
        """Number of messages that the network did not keep until they were read."""
        self.has_caught_up = False
        """Whether everything that was sent before this coordinator began has been read."""
        self._settings, self._disk, self._checkpoints, self._halts = settings, disk, checkpoints, halts
        self._is_identity_written = False
        self._num_seated = 0
        self._has_news = False
        """Whether something was heard since the last judgement."""
        self._links: dict[int, str] = {}
        """For each rank, the last state of its connection that was noted."""
        self._written_taken: int | None = None
        self._asked: dict[ExamKey, int] = {}
        """For each examination, when it was first asked for."""

    @property
    def run_id(self) -> str:
        """Name of the run, for those who connect."""
        return self._settings.run_id

    @property
    def run_dir(self) -> Path:
        """Directory of the run, for those who connect."""
        return self._settings.run_dir

    def refusal(self, hello: wire.Hello) -> str | None:
        """Return why this sidecar is refused; None if it is not."""
        return self.roster.refusal(hello)

    def connect(self, hello: wire.Hello, now_ns: int) -> int:
        """Note that a sidecar is connected; return the number of its connection."""
        known = self.roster.members.get(hello.rank)
        if known is not None and known.hello.rank_pid != hello.rank_pid:
            self._halts.forget(hello.rank)
        if self.roster.is_new_key(hello) and self._num_seated < SEATED_OF_RANK * max(hello.world_size, SEATED_OF_RANK):
            self._num_seated += 1
            seated = Seated(digest=digest_of(hello.key))
            self.journal.append(now_ns, Observation(rank=hello.rank, step=-1, at_ns=now_ns, body=seated))
        connection = self.roster.connect(hello)
        self._note_link(hello.rank, now_ns)
        return connection

    def disconnect(self, rank: int, connection: int, now_ns: int, *, is_closed: bool) -> None:
        """Note that a connection ended, closed by the other side or given up."""
        self.roster.disconnect(rank, connection, is_closed=is_closed)
        self._note_link(rank, now_ns)

    def goodbye(self, rank: int) -> None:
        """Note that a sidecar has sent everything."""
        self.roster.goodbye(rank)

    def took(self, sequence: int, num_lost: int = 0) -> None:
        """Note the position up to which the stream was read; it is journalled behind what was read."""
        self.taken, self.num_lost = sequence, num_lost

    async def begin_at(self, sequence: int) -> None:
        """Start anew at this position, and return once that is on the disk.

        Nobody is welcomed before: a successor reads on from there.
        """
        self.took(sequence)
        self.write_down(is_now=True)
        await self._disk.written()

    def caught_up(self) -> None:
        """Note that everything that was sent before this coordinator began has been read."""
        self.has_caught_up = True

    def has_room(self, rank: int, num_bytes: int, now_ns: int) -> bool:
        """Whether a message of this size is taken in; if not, it still counts as a sign of life."""
        has_room = self.roster.allowance.take(rank, num_bytes, now_ns)
        if not has_room:
            self.hear_sign(rank, now_ns)
        return has_room

    def hear_sign(self, rank: int, now_ns: int) -> None:
        """Note that a sidecar sent something."""
        self.roster.hear(rank)
        self._note_link(rank, now_ns)

    def look(self, now_ns: int, *, is_final: bool = False) -> None:
        """Notice sidecars that have fallen silent, and how the time is spent."""
        for rank in self.roster.look(now_ns):
            self._note_link(rank, now_ns)
        self.wall_time.look(now_ns, lambda: ranks_seen(self.roster), self.assembly.arrivals, is_final=is_final)

    def hear(self, rank: int, report: wire.Report, now_ns: int) -> bool:
        """Take in a report; return whether it should be judged at once."""
        self.hear_sign(rank, now_ns)
        member = self.roster.members[rank]
        member.dropped = max(member.dropped, report.dropped)
        if report.heartbeat is not None:
            self.roster.beat(rank, report.heartbeat, now_ns)
        has_urgent = False
        for observation in report.observations:
            is_joined = isinstance(observation.body, StepsDone)
            has_urgent |= self._hear_one(observation, is_joined or observation.rank != rank, now_ns)
        return has_urgent

    def hear_host(self, ranks: Collection[int], report: wire.HostReport, now_ns: int) -> bool:
        """Take in what an agent reports of these ranks; return whether it should be judged at once."""
        quiet = set(report.quiet)
        for rank in ranks:
            if rank not in quiet:
                self.hear_sign(rank, now_ns)
        for rank, heartbeat in report.heartbeats:
            if rank in ranks:
                self.roster.beat(rank, heartbeat, now_ns)
        for rank, dropped in report.dropped:
            if rank in ranks:
                self.roster.members[rank].dropped = max(self.roster.members[rank].dropped, dropped)
        has_urgent = False
        for observation in report.observations:
            if isinstance(observation.body, StepsDone):
                self._hear_joined(observation, observation.body, ranks, now_ns)
            else:
                has_urgent |= self._hear_one(observation, observation.rank not in ranks, now_ns)
        return has_urgent

    def _hear_one(self, observation: Observation, is_strange: bool, now_ns: int) -> bool:  # noqa: FBT001
        body = observation.body
        if is_strange or observation.step < -1 or isinstance(body, Own) or not is_sound(body):
            self.strangers += 1
            return False
        self._take(observation, now_ns)
        return is_urgent(observation)

    def _hear_joined(self, observation: Observation, joined: StepsDone, ranks: Collection[int], now_ns: int) -> None:
        """Take in one step of several ranks; it is kept in the joined form."""
        if observation.step < 0 or not joined.is_sound or not all(rank in ranks for rank in joined.ranks):
            self.strangers += 1
            return
        self.assembly.add(observation, now_ns)
        self.journal.append(now_ns, observation)
        self.roster.observe_joined(observation.step, joined, now_ns)
        self.wall_time.hear_joined(observation.step, joined, now_ns)
        self._has_news = True

    def hear_table(self, key: TableKey, answer: Observation | None, now_ns: int) -> None:
        """Take in the answer to a Fetch: the requested table, or None if it cannot be had."""
        if answer is not None and is_answer(key, answer):
            self._take(answer, now_ns)
        else:
            tensor_class, step, rank = key
            missing = Unavailable(tensor_class=tensor_class)
            self._note(Observation(rank=rank, step=step, at_ns=now_ns, body=missing), now_ns)

    def to_examine(self, keys: Iterable[ExamKey], now_ns: int) -> tuple[ExamKey, ...]:
        """Return those of the wanted examinations that are to be asked for now; each is asked for once."""
        found = tuple(key for key in keys if self._is_to_ask(key, now_ns))
        while self._asked and now_ns - next(iter(self._asked.values())) > ASKED_NS:
            del self._asked[next(iter(self._asked))]
        return found

    def take_news(self) -> bool:
        """Whether anything was heard since this was last called."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def write_own(self, body: Body, now_ns: int, *, is_now: bool = True) -> None:
        """Journal what the coordinator itself did.

        With `is_now` it is on its way to the disk at once: orders of a halt are, before anybody is told.
        """
        self.journal.append(now_ns, Observation(rank=-1, step=-1, at_ns=now_ns, body=body))
        if is_now:
            self.journal.flush(self._disk, is_now=True)

    def write_goodput(self, now_ns: int) -> None:
        """Write where the time went so far, for the next life of the run and for readers after its end."""
        self._disk.submit(partial(write_whole, self.run_dir / GOODPUT, as_json(self.wall_time.goodput(now_ns))))

    def write_down(self, *, is_now: bool = False) -> None:
        """Write what arrived since the last time; many ranks that attach together make one write."""
        if not self._is_identity_written:
            self._is_identity_written = True
            self._write_identity(None)
        if self.taken is not None and self.taken != self._written_taken:
            self._written_taken = self.taken
            self.write_own(Consumed(sequence=self.taken), clock.wall_ns(), is_now=False)
        self.journal.flush(self._disk, is_now=is_now)

    def end(self, now_ns: int, steps: int | None = None) -> None:
        """Write the end. Nothing is written afterwards, because the run may have been started again."""
        self._write_identity(now_ns, steps)
        self.write_goodput(now_ns)
        self.journal.flush(self._disk, is_now=True)

    def warnings(self) -> list[str]:
        """Return sentences on what went wrong in the intake."""
        found = {
            f"journal: {self.journal.dropped} entries lost": self.journal.dropped,
            "journal: what a former coordinator wrote is damaged in places; all else was read": self.journal.num_damaged,
            f"sidecars lost: {self.roster.sidecars_lost}": self.roster.sidecars_lost,
            f"ranks that came twice: {self.roster.duplicates}": self.roster.duplicates,
            f"observations that cannot be: {self.strangers}": self.strangers,
            f"messages that the network did not keep until this coordinator read them: {self.num_lost}": self.num_lost,
        }
        return [text for text, num in found.items() if num]

    def _take(self, observation: Observation, now_ns: int) -> None:
        self._note(observation, now_ns)
        self.roster.observe(observation, now_ns)
        self._checkpoints.hear(observation)
        self.wall_time.hear(observation, now_ns)
        match observation.body:
            case Halting():
                self._halts.hear(observation, now_ns)
            case Groups(groups=groups):
                for group in groups[: max(0, MAX_GROUPS - sum(map(len, self.mesh.values())))]:
                    self.mesh[group.description or group.name].add(group.ranks)
            case Attached() as attached:
                is_new = self.introductions.add(observation.rank, attached)
                self._is_identity_written = self._is_identity_written and not is_new

    def _note(self, observation: Observation, now_ns: int) -> None:
        self.assembly.add(observation, now_ns)
        self.journal.append(now_ns, observation)
        self._has_news = True

    def _note_link(self, rank: int, now_ns: int) -> None:
        """Journal the state of a connection if it changed, except that it ended after Goodbye."""
        member = self.roster.members[rank]
        if self._links.get(rank) != member.link and not member.line.has_said_goodbye:
            self._links[rank] = member.link
            self._note(Observation(rank=rank, step=-1, at_ns=now_ns, body=Link(state=member.link)), now_ns)

    def _is_to_ask(self, key: ExamKey, now_ns: int) -> bool:
        """Whether to ask for an examination now, once.

        If the sidecar does not answer in time, or is not there, that is noted.
        """
        asked_ns = self._asked.setdefault(key, now_ns)
        member = self.roster.members.get(key.rank)
        is_there = member is not None and member.line.is_live
        if not is_there or now_ns - asked_ns > EXAM_PATIENCE_NS:
            missed = Observation(rank=key.rank, step=-1, at_ns=now_ns, body=Unexamined(asked_ns=key.asked_ns))
            self._note(missed, now_ns)
            return False
        return asked_ns == now_ns

    def _write_identity(self, ended_ns: int | None, steps: int | None = None) -> None:
        content = as_json(self.introductions.record(ended_ns, steps))
        self._disk.submit(partial(write_whole, self.run_dir / "run.json", content, 0o600))


def ranks_seen(roster: Roster) -> RanksSeen:
    """Return what the ranks do now, as far as they report it."""
    living = [member for member in roster.members.values() if member.exited is None and member.state != "ended"]
    return RanksSeen(
        phases={member.progress.phase for member in living if member.progress.phase is not None},
        num_expected=max(len(roster.members), roster.world_size) - len(roster.members) + len(living),
        is_complete=roster.is_complete,
        has_ended=bool(roster.members) and not living,
    )


def is_answer(key: TableKey, observation: Observation) -> bool:
    """Whether this is the table that was asked for, and is consistent."""
    table = observation.body
    return (
        isinstance(table, Table)
        and key == (table.tensor_class, observation.step, observation.rank)
        and len(table.names) == len(table.fingerprints)
        and all(len(beside) in (0, len(table.names)) for beside in (table.norms, table.sums, table.marks))
    )


def is_sound(body: Body) -> bool:
    """Whether the times in it are valid for calculations."""
    match body:
        case Overdue() as overdue:
            return _are_times(overdue.waited_s, overdue.deadline_s)
        case Exam() as exam:
            return _are_times(exam.waited_s, exam.process.stopped_s if exam.process else 0.0)
        case _:
            return True


def _are_times(*seconds: float) -> bool:
    # NaN is not between anything.
    return all(0.0 <= each <= LONGEST_S for each in seconds)
