"""Finds the culprits of a standstill, for whom the others wait: how they are recognised, and when that is certain.

    suspended        the kernel holds a process: stopped, traced, frozen
    unreachable      a host is no longer heard
    collectives      the recorders of all ranks: who has not entered what the others wait in, or entered something else. A rank in a
                     call that no recorder shows (gloo's send, recv and monitored_barrier), as its stack tells, waits like the others
    ended            everyone who lives waits, and somebody is gone
    uninterruptible  everyone waits, and one of them in a system call that does not end
    stacks           where no recorder tells: who is not in a collective while others are
    place            without stacks: who is behind in step, micro-step or phase
    everyone         nobody waits for anyone, or all wait for all

The first line that gives an answer counts. Ranks that wait are victims, whatever they look like.

A culprit is named when its own time is up, and a second look shows that it has not moved. How long something may take
depends on what the culprit does: that a rank waits for a peer which is saving is no news.

    suspended               3 s after the kernel stopped it
    ended, unreachable      when those who wait for it are overdue
    a deadlock              when those who are in it are overdue; what is proven, after 20 s at the latest
    without a sidecar       when those who wait for it have been overdue for a minute
    anybody else            when its own deadline has passed, and the patience that its stack asks for;
                            before the first step, two hours while it works
    nobody waits for it     much later
    a backend gave up       at once: its timeout has proved the hang
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from holter.faults.hangs.endings import how
from holter.faults.hangs.standstill import Look, Standstill
from holter.faults.shared.collectives import analysed
from holter.faults.window import Delay, RankExit
from holter.flight import Analysis, Deviation, Wait, is_over
from holter.patience import CulpritWaits
from holter.records import Flight, Overdue, Phase

By = Literal["suspended", "unreachable", "collectives", "ended", "uninterruptible", "stacks", "place", "everyone"]
MOVING_S = 1.0
"""Seconds: a rank that moved within this time does not wait for anybody yet."""
DEADLOCKS = ("missing", "extra", "order")
"""Kinds of deviation after which no rank can go on."""
SECOND = 1_000_000_000
_ACTIVITIES = {
    "checkpoint": "a save",
    "evaluation": "an evaluation",
    "data": "a data loader",
    "library": "a library's code, a file or another process",
}


@dataclass(frozen=True)
class Blame:
    """The culprits of a standstill and the ranks that they hold up."""

    culprits: tuple[int, ...]
    by: By
    waiting: tuple[int, ...]
    """Living ranks that wait in a collective; culprits too, if they wait in another one."""
    analysis: Analysis | None
    deviation: Deviation | None = None
    is_clear: bool = True
    """False if the culprit is among those named, but it is unknown which one it is."""
    is_deadlock: bool = False
    """Whether nothing that any rank does can end it."""

    @property
    def is_proven(self) -> bool:
        """Whether more time cannot help: what the others wait for is past, or will never come."""
        deviation = self.deviation
        return self.is_deadlock or (deviation is not None and deviation.is_clear and deviation.kind in DEADLOCKS)

    @cached_property
    def victims(self) -> tuple[int, ...]:
        """Ranks that wait for others."""
        blamed = set(self.culprits)
        return tuple(rank for rank in self.waiting if rank not in blamed)

    @property
    def place(self) -> Wait | Deviation | None:
        """The collective to speak of.

        It is the one that the victims wait in, or the one at which the ranks deviated if all are in a call.
        """
        return self.wait or self.deviation

    @cached_property
    def wait(self) -> Wait | None:
        """The collective in which the victims wait."""
        if self.analysis is None:
            return None
        if self.analysis.blocking is not None:
            return self.analysis.blocking
        blamed = set(self.culprits)
        waits = self.analysis.waits
        return next((wait for wait in waits if blamed & set(wait.absent)), waits[0] if waits else None)


@dataclass(frozen=True)
class _Case:
    """What is known before any rank is blamed."""

    scene: Standstill
    living: Mapping[int, Look]
    """Looks at the ranks that live."""
    analysis: Analysis | None
    waiting: frozenset[int]
    absent: frozenset[int]
    """Living ranks that others wait for according to the recorders, and that wait for nobody."""

    @cached_property
    def unrecorded(self) -> frozenset[int]:
        """Living ranks that wait in a call that their recorder does not show."""
        return frozenset(rank for rank in self.waiting if _is_in_unrecorded(self.living[rank]))

    @cached_property
    def busy(self) -> frozenset[int]:
        """Living ranks that are in no call, as far as was seen."""
        return frozenset(rank for rank, look in self.living.items() if look.activity != "unknown") - self.waiting

    def blame(
        self,
        ranks: Iterable[int],
        by: By,
        deviation: Deviation | None = None,
        *,
        is_clear: bool = True,
        is_deadlock: bool = False,
    ) -> Blame | None:
        """Blame these ranks; None if there are none."""
        culprits = tuple(sorted(ranks))
        waiting = tuple(sorted(self.waiting))
        return Blame(culprits, by, waiting, self.analysis, deviation, is_clear, is_deadlock) if culprits else None


def blame(scene: Standstill) -> Blame | None:
    """Return whom to blame; None if too little was seen yet, or all ranks are stopped on purpose."""
    living = {rank: look for rank, look in scene.looks.items() if rank in scene.living}
    if not living or not _is_enough(scene, living):
        return None
    suspended = {rank for rank, look in living.items() if look.is_suspended}
    if len(suspended) == len(living):
        return None
    recorders = flights(scene)
    analysis = analysed(recorders, scene.window.world_size) if recorders else None
    waiting = _waiting(scene, living, analysis)
    case = _Case(scene, living, analysis, waiting, _absent(scene, analysis, waiting))
    # Somebody may have stopped a waiting rank to find out why it waits.
    is_victim_held = bool(case.absent) and suspended <= waiting
    return (
        (None if is_victim_held else case.blame(suspended, "suspended"))
        or _by_silence(case)
        or _by_collectives(case)
        or (case.blame(scene.ended, "ended") if waiting and waiting == living.keys() else None)
        or _by_state(case)
        or _by_stacks(case)
        or _by_place(case)
        or case.blame(living, "everyone", is_clear=len(living) == 1)
    )


def _is_enough(scene: Standstill, living: Mapping[int, Look]) -> bool:
    """Whether half of the ranks were seen, or are known not to be reachable."""
    unexamined = scene.window.processes.unexamined
    lost = (
        rank
        for rank in scene.living - living.keys()
        if scene.is_silent(rank) or unexamined.get(rank, 0) >= scene.asked_ns
    )
    return 2 * (len(living) + sum(1 for _ in lost)) >= len(scene.living)


def flights(scene: Standstill, ranks: Sequence[int] | None = None) -> dict[int, Flight]:
    """Return the recorders that show where their ranks are now."""
    wanted = scene.looks if ranks is None else [rank for rank in ranks if rank in scene.looks]
    return {rank: flight for rank in wanted if (flight := scene.looks[rank].flight) is not None}


def _waiting(scene: Standstill, living: Mapping[int, Look], analysis: Analysis | None) -> frozenset[int]:
    """Return the ranks that are in a call, by recorder or stack.

    A rank at the end of a chain of recorded waits does not wait.
    """
    deviated = {rank for one in analysis.deviations for rank in one.ranks} if analysis else set()
    awaited = set(analysis.culprits) - deviated if analysis else set()
    return frozenset(
        rank
        for rank, look in living.items()
        if not _is_moving(look)
        and ((_is_in_unrecorded(look) and scene.delay(rank)) or (rank not in awaited and _is_in_call(look)))
    )


def _is_moving(look: Look) -> bool:
    """Whether the rank has just moved: one that trains is in some collective at many looks.

    Does not apply to dumps, whose step is below 0.
    """
    return look.seen.step >= 0 and look.exam.waited_s < MOVING_S


def _is_in_call(look: Look) -> bool:
    if look.flight is None:
        return look.activity == "collective"
    return any(not is_over(call) for call in look.flight.calls)


def _is_in_unrecorded(look: Look) -> bool:
    """Whether it is in a collective by its stack alone; that counts only if its sidecar reports, too, that it stands still."""
    return look.flight is not None and look.activity == "collective" and not _is_in_call(look)


def _absent(scene: Standstill, analysis: Analysis | None, waiting: frozenset[int]) -> frozenset[int]:
    """Return the ranks that the others wait for; if something is known of some of them, only those."""
    found = (scene.living & set(analysis.culprits)) - waiting if analysis else frozenset()
    known = {rank for rank in found if (look := scene.looks.get(rank)) and (look.flight or look.activity != "unknown")}
    return frozenset(known) or found


def _by_silence(case: _Case) -> Blame | None:
    silent = {rank for rank in case.scene.living if case.scene.is_silent(rank)} - case.waiting
    return case.blame(silent, "unreachable") if case.waiting and not case.absent - silent else None


def _by_collectives(case: _Case) -> Blame | None:
    analysis = case.analysis
    if analysis is None or not case.waiting:
        return None
    deviation = next((one for one in analysis.deviations if set(one.ranks) & set(analysis.culprits)), None)
    if case.absent:
        # They are in no call themselves, but an earlier call of theirs may have been wrong.
        is_theirs = deviation is not None and bool(set(deviation.ranks) & case.absent)
        return case.blame(case.absent, "collectives", deviation if is_theirs else None)
    if deviation is not None:
        is_deadlock = deviation.kind in DEADLOCKS
        return case.blame(
            deviation.ranks, "collectives", deviation, is_clear=deviation.is_clear, is_deadlock=is_deadlock
        )
    # All ranks that are waited for wait themselves: a cycle, unless one waits in an unrecorded call and some rank is still to come.
    awaited = {rank for wait in analysis.waits for rank in wait.absent}
    is_unrecorded = bool(awaited & case.unrecorded)
    if not awaited <= case.waiting or (is_unrecorded and case.busy):
        return None
    return case.blame(awaited, "collectives", is_clear=False, is_deadlock=not is_unrecorded)


def _by_state(case: _Case) -> Blame | None:
    held = {rank for rank, look in case.living.items() if look.is_uninterruptible}
    return case.blame(held, "uninterruptible") if case.waiting - held else None


def _by_stacks(case: _Case) -> Blame | None:
    """Blame ranks that are in no collective.

    If the recorders of others show whom all wait for, only ranks without a recorder are blamed.
    """
    waits = case.analysis.waits if case.analysis else ()
    is_told = any(set(wait.absent) - case.unrecorded for wait in waits)
    busy = {rank for rank in case.busy if not is_told or case.living[rank].flight is None}
    return case.blame(busy, "stacks") if case.waiting else None


def _by_place(case: _Case) -> Blame | None:
    """Blame the ranks that are behind all others; phases outside of the order are compared by step and micro-step only."""
    is_blind = not any(look.flight or look.stacked.stacks for look in case.living.values())
    if not case.waiting and not is_blind:
        return None
    places = {rank: place for rank in case.scene.living if (place := case.scene.place(rank)) is not None}
    first = min((place[:2] for place in places.values()), default=(0, 0))
    behind = {rank for rank, place in places.items() if place[:2] == first}
    if len(behind) == len(places):
        phases = [place[2] for place in places.values()]
        behind = {rank for rank, place in places.items() if 0 <= place[2] == min(phases) < max(phases)}
    return case.blame(behind - case.waiting, "place")


@dataclass(frozen=True)
class Due:
    """When a culprit's time is up."""

    ready_ns: int
    """From this moment on it may be named; a second look is asked for at this moment."""
    overdue_ns: int
    """When the deadline passed, by the ranks' own clock."""
    why: str
    is_proven: bool = False
    """Whether there is nothing left to wait for."""


def proven(scene: Standstill, blamed: Blame, gave_up: RankExit | None) -> Due | None:
    """Return that the time is up at once, if a waiting rank's backend has given up.

    The culprit's own deadline then no longer counts.
    """
    if gave_up is None or gave_up.rank not in blamed.victims:
        return None
    why = f"rank {gave_up.rank}, which waited for it, {how(gave_up)}"
    return Due(scene.now_ns, gave_up.at_ns, why, is_proven=True)


def due(scene: Standstill, blamed: Blame, rank: int, waits: CulpritWaits) -> Due | None:
    """Return when this culprit's time is up; None if it still has time, as far as is known."""
    look = scene.looks.get(rank)
    if blamed.by == "suspended":
        return _due_suspended(look, waits) if look else None
    found = _due_at_length(scene, blamed, rank, waits)
    proven = _due_proven(scene, blamed, rank, waits) if blamed.is_proven else None
    return min((one for one in (found, proven) if one), key=lambda one: one.ready_ns, default=None)


def _due_at_length(scene: Standstill, blamed: Blame, rank: int, waits: CulpritWaits) -> Due | None:
    """Return when its time is up by the deadlines of the phases."""
    if blamed.by in {"ended", "unreachable"} or blamed.is_deadlock:
        return _due_with_victims(scene, blamed, rank, waits)
    look, delay = scene.looks.get(rank), scene.overdue(rank)
    if delay is None:
        return _due_unseen(scene, blamed, rank, waits) if blamed.victims else None
    needed_s, why = (_needed_s if blamed.victims else _alone_s)(waits, look, delay)
    more_ns = max(0, round((needed_s - delay.overdue.waited_s) * SECOND))
    return Due(delay.at_ns + more_ns, delay.moved_ns + round(needed_s * SECOND), why)


def _needed_s(waits: CulpritWaits, look: Look | None, delay: Delay) -> tuple[float, str]:
    """Return the seconds that a rank is given while others wait for it, and why."""
    deadline_s, stands = delay.overdue.deadline_s, delay.overdue.because
    if look is None or not look.stacked.stacks:
        return max(deadline_s, waits.unseen_s), f"{stands}; its stack could not be seen"
    asked = _asked_by_stack(waits, look, delay.overdue)
    return (max(deadline_s, asked[0]), f"{stands}; {asked[1]}") if asked else (deadline_s, stands)


def _asked_by_stack(waits: CulpritWaits, look: Look, overdue: Overdue) -> tuple[float, str] | None:
    """Return the patience in seconds that its stack asks for, and why; None for none beyond its deadline."""
    if overdue.num_steps == 0 and look.is_busy:
        return waits.setup_s, "it is at work"
    if look.activity == "compile":
        return waits.compile_s, "it compiles"
    if look.activity == "compute" and look.is_cpu_moving is not False:
        return waits.library_s, "its stack shows one operation of torch's"
    is_saving = (overdue.phase, look.activity) == (Phase.CHECKPOINT, "library")
    if look.activity in _ACTIVITIES and overdue.phase.name.lower() != look.activity and not is_saving:
        # The deadline includes what the script's earlier evaluations needed between two calls of the model.
        is_learned = look.activity == "evaluation" and overdue.has_evaluated and look.is_own_code
        return waits.evaluation_s if is_learned else waits.library_s, f"its stack shows {_ACTIVITIES[look.activity]}"
    return None


def _alone_s(waits: CulpritWaits, look: Look | None, delay: Delay) -> tuple[float, str]:
    """Return the seconds that a rank is given while nobody waits for it, and why."""
    needed_s, why = _needed_s(waits, look, delay)
    is_common = delay.overdue.phase in {Phase.DATA, Phase.CHECKPOINT, Phase.EVALUATION} or (
        look is not None and look.activity == "collective"
    )
    return max(needed_s, waits.everyone_s if is_common else waits.everyone_in_script_s), f"{why}; nobody waits for it"


def has_stayed(scene: Standstill, rank: int) -> bool:
    """Whether neither its looks nor its sidecar's report show that it moved."""
    look, delay = scene.looks.get(rank), scene.delay(rank)
    if look is None or delay is None:
        return look is None or not look.has_moved
    place = (delay.step, delay.overdue.phase, delay.overdue.micro_step)
    return not look.has_moved and place == (look.seen.step, look.exam.phase, look.exam.micro_step)


def is_answered(scene: Standstill, rank: int, asked_ns: int) -> bool:
    """Whether a look asked for at this moment or later was answered, or certainly will not be."""
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
    """Return when it and all who wait have stood still for a while, as their sidecars report: nobody who moves is held up."""
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
    """Return when its time is up if its sidecar is gone, so that only the ranks that wait for it are known to stand still."""
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
