"""What a halt must know of the run, read off the roster, the window and the diagnoses. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from holter.coordinator.halt.driver import HaltDriver
from holter.coordinator.roster import Member, Roster
from holter.faults import CAUSES, Window
from holter.faults.family import engine_facts
from holter.halting import verdicts
from holter.halting.plan import JobShape, RankSituation, Wish
from holter.records import Cause, Diagnosis, Finding, Phase

HELD_BACK = ("stopped", "traced", "frozen", "uninterruptible", "zombie", "gone")
"""States of a process in which none of its threads runs."""
STANDING = ("held", "dying", "terminated")
DEFAULT_STEP_S = 1.0
NUM_RECENT = 4
"""How many steps the step time is taken from: it may just have changed."""


def rank_places(roster: Roster, window: Window, halts: HaltDriver) -> list[RankSituation]:
    """Every rank of the job; those that never came are not there."""
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
    # A rank that has gone on since, and whose word of that was lost, does not stand.
    if said is not None and said[0].state in STANDING and (at is None or said[1] >= at):
        halting, step = said
        return replace(known, step=step, state=halting.state, is_torn=halting.is_torn)
    return replace(known, is_torn=member.progress.phase is Phase.OPTIMIZER, is_able=_is_able(rank, window))


def _is_able(rank: int, window: Window) -> bool:
    """Whether a thread of it can run, as far as the last look at a rank that stands still tells."""
    seen = window.processes.exams.get(rank, ())
    delay = window.processes.delays.get(rank)
    if delay is None or not seen:
        return True
    last = seen[-1].exam
    is_held_back = last.process is not None and last.process.state in HELD_BACK
    return not is_held_back and last.is_lock_free is not False


def job(window: Window, roster: Roster) -> JobShape:
    """How long a step takes, and whether its state is cut into shards."""
    recent = [spread.mean for _, spread in window.values("seconds")[-NUM_RECENT:]]
    return JobShape(
        step_s=sum(recent) / len(recent) if recent else DEFAULT_STEP_S,
        is_sharded=any(member.is_sharded for member in roster.members.values()),
    )


def wish(diagnoses: Iterable[Diagnosis], findings: Sequence[Finding], window: Callable[[], Window]) -> Wish | None:
    """The halt that the gravest open diagnosis asks for, of several the newest. A hang that is over asks for none."""
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
            is_blocked=is_hang or (entry is not None and entry.is_death),
            first_bad=next((spoil.first_bad for spoil in spoiled if spoil.verdict == "poisoned"), None),
        )
    return None


def _is_running(findings: Sequence[Finding], cause: Cause) -> bool:
    """Whether calls did not match and the job goes on with what they returned: then nothing hangs, and nothing ends by itself."""
    return any(finding.ranks == cause.ranks and engine_facts(finding).get("is_running") is True for finding in findings)


def suspicion(diagnoses: Iterable[Diagnosis]) -> Wish | None:
    """Why ranks stand before a step that is not finite: the newest diagnosis of such a fault, however unsure."""
    for diagnosis in reversed(list(diagnoses)):
        first = diagnosis.causes[0] if diagnosis.causes else None
        if first is None or first.cause not in CAUSES or diagnosis.closed_at is not None:
            continue
        damage = CAUSES[first.cause].damage
        if damage is not None and damage.begins == "with the step":
            reason = f"gradients that are not finite were held before they reached the weights; {diagnosis.symptom}"
            return Wish(cause=first.cause, reason=reason, ranks=first.ranks, incident=diagnosis.id)
    return None
