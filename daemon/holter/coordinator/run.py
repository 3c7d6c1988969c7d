"""One run under observation, without a socket: it is told what arrives and what time it is, and returns what to do.

    Intake      what arrives, and who is there
    Judge       findings, and the incidents made of them
    HaltDriver  how a halt continues

`Run` connects them: after each judgement it stores the incidents and asks the halt driver how to continue. What a halt
must know of the run is derived from the roster, the window and the diagnoses by the pure functions below.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from holter import clock
from holter.coordinator.closing import RunSummary
from holter.coordinator.disk import Disk
from holter.coordinator.halt.checkpoint_verdicts import CheckpointVerdicts, compared_until, reported_until
from holter.coordinator.halt.driver import Act, Attempt, HaltDriver, View
from holter.coordinator.halt.sealing import HaltEnding, SealedHalt
from holter.coordinator.identity import RunSettings
from holter.coordinator.incidents import Incidents
from holter.coordinator.intake import Intake
from holter.coordinator.judge import IncidentTracker, Judge, Judgement
from holter.coordinator.roster import Member, Roster
from holter.exporters.webhook import Deliveries
from holter.faults import ALL, BRINGS_ABOUT, CAUSES, DETECTORS, Detector, ExamKey, TableKey, Window
from holter.faults.family import engine_facts
from holter.halting import halt_record, verdicts
from holter.halting.plan import JobShape, RankSituation, Wish
from holter.halting.protocol import SETTLED
from holter.halting.vault.manifest import Circumstances
from holter.halting.verdicts import Sight
from holter.records import Body, Cause, Diagnosis, Finding, Judged, Order, Phase

logger = logging.getLogger(__name__)


HELD_BACK = ("stopped", "traced", "frozen", "uninterruptible", "zombie", "gone")
"""States of a process in which none of its threads runs."""
STANDING = ("held", "dying", "terminated")
DEFAULT_STEP_S = 1.0
NUM_RECENT = 4
"""Number of steps from which the step time is taken; few, because it may just have changed."""


@dataclass(frozen=True)
class FollowUp:
    """What must be done after a judgement."""

    tables: tuple[TableKey, ...] = ()
    """Tables to fetch before some findings can be explained."""
    exams: tuple[ExamKey, ...] = ()
    """Ranks to examine before some findings can be explained; each is asked once."""
    fresh: tuple[Diagnosis, ...] = ()
    """Incidents that nobody has been told of."""
    alarms: tuple[str, ...] = ()
    """Sentences that cannot wait, for example that the latest checkpoint is poisoned."""
    acts: tuple[Act, ...] = ()
    """Actions that a halt needs, in order."""
    halt_news: tuple[str, ...] = ()
    """Sentences on the progress of a halt, for the job's own log."""


class Run:
    """Everything that the coordinator knows of one run."""

    def __init__(self, settings: RunSettings, detectors: Sequence[Detector] = ALL) -> None:
        self.settings = settings
        self.disk = Disk()
        self.checkpoints = CheckpointVerdicts(settings.run_dir, self.disk)
        self.halts = HaltDriver(self._write_own, settings.save_deadline_s)
        self.intake = Intake(settings, self.disk, self.checkpoints, self.halts)
        self.roster, self.assembly = self.intake.roster, self.intake.assembly
        self.incidents = Incidents(settings.run_dir, self.disk)
        self.incidents.load()
        tracker = IncidentTracker(settings.run_id, settings.action, self.incidents.all())
        self.judging = Judge(self.assembly, tracker, detectors)
        self.silent_until_ns = 0
        """Time before which nothing is judged, while sidecars return to a restarted coordinator."""
        self.left_open: list[Diagnosis] = []
        """Incidents that a former life of this run left open."""
        self.also_written_by = ""
        """A sentence if another coordinator writes to the same directory, which then gives the orders while this one
        only watches; else empty."""
        self.deliveries = Deliveries()
        """Counts of messages to the webhook; empty if there is none."""
        self.notifications = Deliveries("notify")
        """Counts of messages to phones and chats."""
        self.events = Deliveries("OpenTelemetry")
        """Counts of events sent to a collector."""

    def judge(self, now_ns: int, *, is_final: bool = False) -> FollowUp:
        """Look at everything, explain what can be explained, and return what must be done."""
        if now_ns < self.silent_until_ns and not is_final and not self.intake.has_caught_up:
            return FollowUp()
        self.intake.look(now_ns, is_final=is_final)
        found = self.judging.judge(now_ns, is_final=is_final)
        found = replace(found, diagnoses=tuple(map(self._recalled, found.diagnoses)))
        self.roster.compare(self.assembly.arrivals())
        self._mark_judged(found, now_ns, is_final=is_final)
        alarms = self.checkpoints.judge(found.findings, found.diagnoses, lambda: self._sight(now_ns), is_final=is_final)
        for diagnosis in found.diagnoses:
            self._put(diagnosis)
        return FollowUp(
            tables=found.tables,
            exams=self.intake.to_examine(found.exams, now_ns),
            fresh=self.judging.news(found.diagnoses),
            alarms=tuple(alarms),
            acts=() if is_final or self.also_written_by else tuple(self.halts.look(now_ns, self._view(now_ns))),
            halt_news=self.halts.take_sentences(),
        )

    def _mark_judged(self, found: Judgement, now_ns: int, *, is_final: bool) -> None:
        """Journal that it was judged now, if anything was heard before or came of it; a replay judges at these moments."""
        is_news = bool(found.diagnoses)
        if self.intake.take_news() or is_final or is_news:
            closed = tuple(diagnosis.id for diagnosis in found.diagnoses if diagnosis.closed_at is not None)
            # The mark is on its way to the disk before the incident is: if the coordinator dies now, its successor
            # finds the incident again by it.
            self.intake.write_own(Judged(is_final=is_final, is_news=is_news, closed=closed), now_ns, is_now=is_news)

    def ending(self, order: Order) -> HaltEnding:
        """Return what is needed to seal a halt's checkpoint."""
        attempt = self.halts.attempt
        assert attempt is not None
        compared_until, step = self._compared_until(), attempt.plan.kept_step
        verdict = self.checkpoints.verdict_of(step, compared_until)
        about = Circumstances(
            run_id=self.settings.run_id,
            step=order.base_step + attempt.plan.kept_step,
            world_size=self.roster.world_size,
            savers=order.savers,
            lost=order.lost,
            failures=dict(attempt.failures),
            cause=attempt.wish.cause,
            verdict=verdict.verdict,
            why=verdict.why,
            uncompared=verdicts.uncompared(step, compared_until),
            mesh={name: [list(ranks) for ranks in sorted(found)] for name, found in self.intake.mesh.items()},
        )
        return HaltEnding(
            run_dir=self.settings.run_dir,
            partial=Path(order.directory),
            about=about,
            wish=attempt.wish,
            last_healthy=self.checkpoints.last_healthy(),
            unheard=tuple(rank for rank in order.savers if self._is_unheard(rank, attempt)),
        )

    def _is_unheard(self, rank: int, attempt: Attempt) -> bool:
        member = self.roster.members.get(rank)
        has_answered = attempt.halt is not None and attempt.halt.heard.get(rank) in SETTLED
        return not has_answered and member is not None and member.exited is None

    def sealed(self, kept: SealedHalt) -> None:
        """Take in that a halt has kept what could be kept."""
        if kept.sealed is not None:
            self.checkpoints.note_sealed(kept.sealed)
        self.halts.sealed(kept.outcome)
        attempt = self.halts.attempt
        known = self.incidents.get(attempt.wish.incident) if attempt is not None and attempt.wish.incident else None
        if known is not None:
            self._put(known)

    def summary(self) -> RunSummary:
        """Return the facts for the run's last line."""
        here = [member.progress.heartbeat.step for member in self.roster.members.values() if member.progress.heartbeat]
        return RunSummary(
            run_dir=str(self.settings.run_dir),
            steps=self.checkpoints.base_step + max(here, default=0),
            incidents=tuple(self.checkpoints.diagnoses),
            halt=halt_record.read(self.settings.run_dir),
            last_healthy=self.checkpoints.last_healthy(),
            blind=tuple(self.blind()),
            goodput=self.intake.wall_time.goodput(clock.wall_ns()),
        )

    def close(self, deadline_s: float) -> None:
        """Wait for the disk."""
        if not self.disk.close(deadline_s):
            logger.warning("gave up waiting for the disk of %s after %.0f s", self.settings.run_dir, deadline_s)

    def blind(self) -> list[str]:
        """Return sentences on what holter cannot see in this run."""
        return self.roster.blind() + self.judging.runner.blind()

    def warnings(self) -> list[str]:
        """Return sentences on what went wrong with holter itself, or is odd about the job."""
        failed, last = self.disk.failures, self.disk.last_failure
        disk = [f"run directory: {failed} writes failed, last {last}"] if failed else []
        lost = self.incidents.num_unreadable
        incidents = [f"incidents: {lost} of an earlier coordinator could not be read"] if lost else []
        told = [text for each in (self.deliveries, self.notifications, self.events) for text in each.warnings()]
        two = [self.also_written_by] if self.also_written_by else []
        return [*two, *disk, *incidents, *self.intake.warnings(), *told]

    def _recalled(self, diagnosis: Diagnosis) -> Diagnosis:
        """Add what earlier runs know of a diagnosis; a failing memory must not cost the diagnosis."""
        earlier = self.settings.earlier
        if earlier is None:
            return diagnosis
        known = self.judging.runner.guard(
            "the memory", lambda: earlier.recall(diagnosis, self.intake.introductions.record())
        )
        return known or diagnosis

    def _put(self, diagnosis: Diagnosis) -> None:
        named = self.halts.named(self.checkpoints.named(diagnosis))
        self.incidents.put(named)
        if named.action.exit_code is not None and named.causes:
            first = named.causes[0]
            self.disk.submit(partial(halt_record.rename, self.settings.run_dir, named.id, first.cause, first.ranks))
        if self.settings.earlier is not None:
            self.disk.submit(partial(self.settings.earlier.remember, diagnosis, self.intake.introductions.record()))

    def _write_own(self, body: Body, now_ns: int) -> None:
        self.intake.write_own(body, now_ns)

    def _sight(self, now_ns: int) -> Sight:
        until_step = reported_until(self.assembly.window(now_ns).steps)
        return Sight(until_step=until_step, compared_until=self._compared_until(), blind=tuple(self.blind()))

    def _compared_until(self) -> int | None:
        return compared_until(self.assembly.classes(), self.checkpoints.diagnoses)

    def _view(self, now_ns: int) -> View:
        window = cache(lambda: self.assembly.window(now_ns))
        return View(
            ranks=lambda: rank_places(self.roster, window(), self.halts),
            wish=lambda: wish(self.checkpoints.diagnoses, self.judging.findings, window),
            suspicion=lambda: suspicion(self.checkpoints.diagnoses),
            job=lambda: job_shape(window(), self.roster),
        )


def rank_places(roster: Roster, window: Window, halts: HaltDriver) -> list[RankSituation]:
    """Return the situation of every rank of the job; ranks that never came are not there."""
    world = roster.world_size or len(roster.members)
    return [_place(rank, roster.members.get(rank), window, halts) for rank in range(world)]


def _place(rank: int, member: Member | None, window: Window, halts: HaltDriver) -> RankSituation:
    if member is None:
        return RankSituation(rank=rank, step=None, is_there=False)
    is_there = member.exited is None and member.line.is_live and not member.line.has_said_goodbye
    at = member.progress.heartbeat.step if member.progress.heartbeat is not None else None
    said = halts.last_word(rank)
    known = RankSituation(
        rank=rank, step=at, is_there=is_there, has_ended=member.exited is not None, snapshots=member.snapshots
    )
    # A rank that has gone on since, but whose report of that was lost, does not stand.
    if said is not None and said.halting.state in STANDING and (at is None or said.step >= at):
        return replace(known, step=said.step, state=said.halting.state, is_torn=said.halting.is_torn)
    return replace(known, is_torn=member.progress.phase is Phase.OPTIMIZER, is_able=_is_able(rank, window))


def _is_able(rank: int, window: Window) -> bool:
    """Whether a thread of the rank can run, as far as the last examination of a stalled rank shows."""
    seen = window.processes.exams.get(rank, ())
    delay = window.processes.delays.get(rank)
    if delay is None or not seen:
        return True
    last = seen[-1].exam
    is_held_back = last.process is not None and last.process.state in HELD_BACK
    return not is_held_back and last.is_lock_free is not False


def job_shape(window: Window, roster: Roster) -> JobShape:
    """Return how long a step takes, and whether the state is cut into shards."""
    recent = [spread.mean for _, spread in window.values("seconds")[-NUM_RECENT:]]
    return JobShape(
        step_s=sum(recent) / len(recent) if recent else DEFAULT_STEP_S,
        is_sharded=any(member.is_sharded for member in roster.members.values()),
    )


def wish(diagnoses: Iterable[Diagnosis], findings: Sequence[Finding], window: Callable[[], Window]) -> Wish | None:
    """Return the halt that the newest open diagnosis with the directive `halt` asks for; None if there is none.

    A hang that is over asks for none.
    """
    for diagnosis in reversed(list(diagnoses)):
        if diagnosis.action.directive != "halt" or diagnosis.closed_at is not None or not diagnosis.causes:
            continue
        first = diagnosis.causes[0]
        entry = CAUSES.get(first.cause)
        is_hang = entry is not None and entry.is_hang and not _is_running(findings, first)
        if is_hang and not window().processes.delays:
            continue
        spoiled = verdicts.spoils(findings, [diagnosis])
        return Wish(
            cause=first.cause,
            reason=f"{diagnosis.action.reason}; {diagnosis.symptom}",
            ranks=first.ranks,
            incident=diagnosis.id,
            is_blocked=is_hang or (entry is not None and entry.is_death) or _has_stopped(first, window),
            first_bad=min((spoil.first_bad for spoil in spoiled), default=None),
        )
    return None


def _has_stopped(cause: Cause, window: Callable[[], Window]) -> bool:
    """Whether consequences of the cause keep ranks from continuing, such as a device that failed under one of them."""
    led = [CAUSES.get(str(proof.values.get("cause"))) for proof in cause.evidence if proof.kind == "consequence"]
    is_hang = any(entry is not None and entry.is_hang for entry in led) and bool(window().processes.delays)
    return is_hang or any(entry is not None and entry.is_death for entry in led)


def _is_running(findings: Sequence[Finding], cause: Cause) -> bool:
    """Whether calls did not match but the job goes on with what they returned: then nothing hangs or ends by itself."""
    return any(finding.ranks == cause.ranks and engine_facts(finding).get("is_running") is True for finding in findings)


def suspicion(diagnoses: Iterable[Diagnosis]) -> Wish | None:
    """Explain why ranks stand before a step that is not finite.

    It is the newest diagnosis of such a fault, however uncertain, else the first of a fault that leads to it. None if
    there is none.
    """
    known = [one for one in diagnoses if one.causes and one.causes[0].cause in CAUSES and one.closed_at is None]
    made = [one for one in reversed(known) if _is_of_nonfinite(one.causes[0].cause)]
    led = [one for one in known if one.severity == "critical" and _leads_to_nonfinite(one.causes[0].cause)]
    for diagnosis in (*made, *sorted(led, key=lambda one: one.first_step)):
        first = diagnosis.causes[0]
        reason = f"gradients that are not finite were held before they reached the weights; {diagnosis.symptom}"
        return Wish(cause=first.cause, reason=reason, ranks=first.ranks, incident=diagnosis.id)
    return None


def _is_of_nonfinite(cause: str) -> bool:
    """Whether the cause itself puts NaN or Inf into gradients."""
    return any(DETECTORS[row.detector].sees_damage for row in CAUSES[cause].rows)


def _leads_to_nonfinite(cause: str) -> bool:
    """Whether gradients that are not finite can result from the cause: they then belong to its incident."""
    detectors = {row.detector for row in CAUSES[cause].rows}
    followers = {name for line in BRINGS_ABOUT if line.leader in detectors for name in line.after}
    is_leading = any(DETECTORS[name].sees_damage for name in followers)
    return is_leading and CAUSES[cause].damage is not None
