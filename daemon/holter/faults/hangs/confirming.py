"""When a suspicion becomes certain: the culprit's own time is up, and a second look shows that it has not moved.

    suspended               3 s after the kernel stopped it
    ended, unreachable      when those who wait for it are overdue
    a deadlock              when those who are in it are overdue; what is proven, after 20 s at the latest
    without a sidecar       when those who wait for it have been overdue for a minute
    anybody else            when its own deadline has passed, and the patience that its stack asks for;
                            before the first step, two hours while it works
    nobody waits for it     much later
    a backend gave up       at once: its timeout has proved the hang

How long something may take is the culprit's to say: a rank that waits for a peer which is saving is no news.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from holter.faults.hangs.culprits import Blame
from holter.faults.hangs.endings import how
from holter.faults.hangs.standstill import Look, Standstill
from holter.faults.window import Delay, RankExit
from holter.patience import CulpritWaits
from holter.records import Overdue, Phase

SECOND = 1_000_000_000


_ACTIVITIES = {
    "checkpoint": "a save",
    "evaluation": "an evaluation",
    "data": "a data loader",
    "library": "a library's code, a file or another process",
}


@dataclass(frozen=True)
class Due:
    """When a culprit's time is up."""

    ready_ns: int
    """From then on it may be named; what a second look is asked for."""
    overdue_ns: int
    """When the deadline passed by the ranks' own clock."""
    why: str
    is_proven: bool = False
    """There is nothing left to wait for."""


def proven(scene: Standstill, blamed: Blame, gave_up: RankExit | None) -> Due | None:
    """A rank that waited for the culprit was told by its backend that the time is up: the culprit's own deadline counts no more."""
    if gave_up is None or gave_up.rank not in blamed.victims:
        return None
    why = f"rank {gave_up.rank}, which waited for it, {how(gave_up)}"
    return Due(scene.now_ns, gave_up.at_ns, why, is_proven=True)


def due(scene: Standstill, blamed: Blame, rank: int, waits: CulpritWaits) -> Due | None:
    """When this culprit's time is up; None if it still has time, for all that is known."""
    look = scene.looks.get(rank)
    if blamed.by == "suspended":
        return _due_suspended(look, waits) if look else None
    found = _due_at_length(scene, blamed, rank, waits)
    proven = _due_proven(scene, blamed, rank, waits) if blamed.is_proven else None
    return min((one for one in (found, proven) if one), key=lambda one: one.ready_ns, default=None)


def _due_at_length(scene: Standstill, blamed: Blame, rank: int, waits: CulpritWaits) -> Due | None:
    """When its time is up by the deadlines of the phases."""
    if blamed.by in {"ended", "unreachable"} or blamed.is_deadlock:
        return _due_with_victims(scene, blamed, rank, waits)
    look, delay = scene.looks.get(rank), scene.overdue(rank)
    if delay is None:
        return _due_unseen(scene, blamed, rank, waits) if blamed.victims else None
    needed_s, why = (_needed_s if blamed.victims else _alone_s)(waits, look, delay)
    more_ns = max(0, round((needed_s - delay.overdue.waited_s) * SECOND))
    return Due(delay.at_ns + more_ns, delay.moved_ns + round(needed_s * SECOND), why)


def _needed_s(waits: CulpritWaits, look: Look | None, delay: Delay) -> tuple[float, str]:
    """How long a rank that others wait for is given, and why."""
    deadline_s, stands = delay.overdue.deadline_s, delay.overdue.because
    if look is None or not look.stacked.stacks:
        return max(deadline_s, waits.unseen_s), f"{stands}; its stack could not be seen"
    asked = _asked_by_stack(waits, look, delay.overdue)
    return (max(deadline_s, asked[0]), f"{stands}; {asked[1]}") if asked else (deadline_s, stands)


def _asked_by_stack(waits: CulpritWaits, look: Look, overdue: Overdue) -> tuple[float, str] | None:
    """The patience that its stack asks for; None: none beyond its deadline."""
    if overdue.num_steps == 0 and look.is_busy:
        return waits.setup_s, "it is at work"
    if look.activity == "compile":
        return waits.compile_s, "it compiles"
    if look.activity == "compute" and look.is_cpu_moving is not False:
        return waits.library_s, "its stack shows one operation of torch's"
    is_saving = (overdue.phase, look.activity) == (Phase.CHECKPOINT, "library")
    if look.activity in _ACTIVITIES and overdue.phase.name.lower() != look.activity and not is_saving:
        # What the script's earlier evaluations needed between two calls of the model is in the deadline.
        is_learned = look.activity == "evaluation" and overdue.has_evaluated and look.is_own_code
        return waits.evaluation_s if is_learned else waits.library_s, f"its stack shows {_ACTIVITIES[look.activity]}"
    return None


def _alone_s(waits: CulpritWaits, look: Look | None, delay: Delay) -> tuple[float, str]:
    """How long a rank that nobody waits for is given, and why."""
    needed_s, why = _needed_s(waits, look, delay)
    is_common = delay.overdue.phase in {Phase.DATA, Phase.CHECKPOINT, Phase.EVALUATION} or (
        look is not None and look.activity == "collective"
    )
    return max(needed_s, waits.everyone_s if is_common else waits.everyone_in_script_s), f"{why}; nobody waits for it"


def has_stayed(scene: Standstill, rank: int) -> bool:
    """Neither its looks nor its sidecar's word show that it moved."""
    look, delay = scene.looks.get(rank), scene.delay(rank)
    if look is None or delay is None:
        return look is None or not look.has_moved
    place = (delay.step, delay.overdue.phase, delay.overdue.micro_step)
    return not look.has_moved and place == (look.seen.step, look.exam.phase, look.exam.micro_step)


def is_answered(scene: Standstill, rank: int, asked_ns: int) -> bool:
    """A look at it was answered that was asked for at this moment or later, or it is known that none will be."""
    look = scene.looks.get(rank)
    return (look is not None and look.exam.asked_ns >= asked_ns) or scene.window.processes.unexamined.get(
        rank, 0
    ) >= asked_ns


def _due_suspended(look: Look, waits: CulpritWaits) -> Due:
    held = [seen for seen in (*look.earlier, look.seen) if Look(look.rank, seen).is_suspended]
    first = held[0]
    since_ns = first.at_ns - round(Look(look.rank, first).suspended_s * SECOND)
    at_ns = since_ns + round(waits.suspended_s * SECOND)
    return Due(at_ns, at_ns, f"a process that is held does not go on by itself: {waits.suspended_s:g} s are enough")


def _due_proven(scene: Standstill, blamed: Blame, rank: int, waits: CulpritWaits) -> Due | None:
    """Once it and all who wait have stood for a while, as their sidecars say: nobody who moves is held up."""
    involved = {rank, *blamed.waiting}
    delays = [delay for one in involved if (delay := scene.delay(one)) is not None]
    if len(delays) < max(2, len(involved)):
        return None
    at_ns = max(delay.moved_ns for delay in delays) + round(waits.proven_s * SECOND)
    return Due(at_ns, at_ns, f"what is proven needs no patience: {waits.proven_s:g} s are enough")


def _due_with_victims(scene: Standstill, blamed: Blame, rank: int, waits: CulpritWaits) -> Due | None:
    delay = _first_overdue(scene, (*blamed.waiting, *blamed.culprits))
    if delay is None:
        return None
    over_ns = delay.at_ns - round((delay.overdue.waited_s - delay.overdue.deadline_s) * SECOND)
    ready_ns = delay.at_ns
    if blamed.by == "unreachable":
        silent_ns = scene.window.processes.links[rank].since_ns + round(waits.unreachable_s * SECOND)
        ready_ns, over_ns = max(ready_ns, silent_ns), max(over_ns, silent_ns)
    why = f"its time is up when that of those who wait is: {delay.overdue.because}"
    return Due(ready_ns, over_ns, why)


def _due_unseen(scene: Standstill, blamed: Blame, rank: int, waits: CulpritWaits) -> Due | None:
    """Its sidecar is gone, so that nobody tells whether it moves; those who wait for it do not."""
    delay = _first_overdue(scene, blamed.victims)
    link = scene.window.processes.links.get(rank)
    is_unseen = rank not in scene.looks and scene.window.processes.unexamined.get(rank, 0) >= scene.asked_ns
    is_lost = is_unseen or (link is not None and link.state == "closed")
    if delay is None or not is_lost or scene.delay(rank) is not None:
        return None
    at_ns = delay.at_ns + round(waits.unseen_s * SECOND)
    return Due(
        at_ns, at_ns, f"nobody can look at it, and those who wait for it have been overdue for {waits.unseen_s:g} s"
    )


def _first_overdue(scene: Standstill, ranks: Iterable[int]) -> Delay | None:
    return min((delay for rank in ranks if (delay := scene.overdue(rank))), key=lambda delay: delay.at_ns, default=None)
