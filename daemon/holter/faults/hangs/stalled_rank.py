"""Stalled rank: a rank does not go on, and its peers wait for it in a collective.

What it detects
    Ranks that stand still for longer than they ever did in that phase. All ranks are then looked at from outside: process state, the
    collectives in PyTorch's Flight Recorder, stacks, whether the interpreter answers. The rank that the others wait for is the
    culprit, and is named once its own time is up and a second look shows that it has not moved. Ranks that wait are its victims.

Why it matters
    NCCL notices after ten minutes, gloo after thirty, and both blame the rank that waits. The culprit's log ends in the middle of a line.

False positives
    Only the culprit's own deadline counts, and it is learned: first steps, saving, evaluation and data have their own, and a stack that
    shows compiling, saving, evaluation, a library, a file, another process or one long operation of torch's lengthens it. A rank that
    works for minutes in the script's own code for the first time, while its peers wait, cannot be told from an endless loop. If all
    ranks are stopped (Ctrl-Z) that is meant. A rank held by a debugger, and whatever stands still before the first step is done, is
    a warning and halts nothing. If nobody waits in a collective, nothing is said for a minute and more.

What to do
    Look at the culprit and at no other rank: its stack and its process state are in the evidence. While the job hangs,
    `py-spy dump --native --pid PID` on the culprit's host shows the same.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from holter.faults.hangs.culprits import SECOND, Blame, Due, blame, due, has_stayed, is_answered, proven
from holter.faults.hangs.endings import is_meant, kind_of, own_error
from holter.faults.hangs.stall_report import Culprit, stall_evidence, stall_summary
from holter.faults.hangs.standstill import Standstill, standstill
from holter.faults.shared.collectives import group_of
from holter.faults.shared.wording import ranks_text
from holter.faults.window import RankExit, Window
from holter.patience import CulpritWaits
from holter.records import Collective, ExamDepth, ExamRequest, Finding, Severity

MAX_CULPRITS_SEEN, MAX_VICTIMS_SEEN = 8, 4
"""In a large job: number of ranks whose native stacks are taken, and of victims that are looked at again."""
APART_NS = SECOND
"""Nanoseconds between two looks at least; a look sooner than that would see the same."""

LEAVING_S = 30
"""Seconds that a rank may take to end after it has reported a failure: on a busy machine, Python and torch take seconds
to shut down."""
COMPUTING_S = 6
"""Seconds for which a rank in an operation of torch is looked at in quick succession; each look pauses it for up to a
second."""


@dataclass(frozen=True)
class StalledRank(CulpritWaits):
    """Judges who holds the job up; its thresholds are the waits before a culprit is named."""

    name: ClassVar[str] = "stalled_rank"

    many_ranks: int = 64
    """Number of ranks above which a job is looked at quickly first, and thoroughly only where it matters."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"stalled_rank.{field.name} must not be negative, got {getattr(self, field.name)}")

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the culprits of the present standstill, or what must be asked before they can be named."""
        broken = next((end for end in window.processes.exits if is_meant(end) or kind_of(end) != "ordinary"), None)
        if broken is not None:
            # Judge what stood still before the first rank ended or was killed by what was known then.
            then = _as_of(window, broken.at_ns)
            before = [found for found in self._judged(then, _gave_up(window, broken)) if not found.needs]
            if before or is_meant(broken):
                yield from before
                return
        for found in self._judged(window):
            # After a rank has died, a further standstill is not judged: somebody may be looking into the death.
            if broken is None or found.needs or (found.facts["has_died"] and own_error(broken) != "script"):
                yield found

    def _judged(self, window: Window, gave_up: RankExit | None = None) -> Iterator[Finding]:
        scene = standstill(window)
        if scene is None:
            return
        is_large = self._is_large(scene)
        # Native frames pause a rank, and in the first steps most ranks compile.
        is_quick = is_large or scene.is_early
        needs = [self._request(scene, scene.living, scene.asked_ns, "quick" if is_quick else "native")]
        blamed = blame(scene)
        if blamed is not None and _is_hang(scene, blamed):
            proof = proven(scene, blamed, gave_up)
            dues = {rank: found for rank in blamed.culprits if (found := proof or due(scene, blamed, rank, self))}
            confirmed = [
                rank
                for rank, found in dues.items()
                if not _is_leaving(window, rank) and self._is_confirmed(scene, blamed, rank, found)
            ]
            if confirmed and (blamed.victims or blamed.is_deadlock or len(confirmed) == len(blamed.culprits)):
                yield self._finding(scene, dataclasses.replace(blamed, culprits=tuple(confirmed)), dues)
                return
            if is_large:
                seen = (*blamed.culprits[:MAX_CULPRITS_SEEN], *blamed.victims[:MAX_VICTIMS_SEEN])
                needs.append(self._request(scene, seen, scene.asked_ns + 1, "native"))
            needs += self._second_looks(scene, blamed, dues, is_large=is_large)
        needs += self._fresh_looks(scene, blamed, is_large=is_large)
        needed = tuple(request for request in needs if request.ranks)
        if needed:
            yield self._suspicion(scene, needed)

    def _is_large(self, scene: Standstill) -> bool:
        return len(scene.living) > self.many_ranks

    def _is_confirmed(self, scene: Standstill, blamed: Blame, rank: int, found: Due) -> bool:
        if scene.now_ns < found.ready_ns:
            return False
        if found.is_proven:
            return has_stayed(scene, rank)
        look = scene.looks.get(rank)
        is_late = scene.now_ns - found.ready_ns > self.late_s * SECOND
        if blamed.by == "suspended":
            is_held = look is not None and look.suspended_s >= self.suspended_s - 0.1 and _is_seen_twice(scene, rank)
            # Whoever stops a job stops one rank after the other.
            others = blamed.victims[:MAX_VICTIMS_SEEN] if self._is_large(scene) else scene.living
            return is_held and (is_late or all(is_answered(scene, other, found.ready_ns) for other in others))
        if blamed.by in {"ended", "unreachable"}:
            return is_late or any(is_answered(scene, victim, found.ready_ns) for victim in blamed.victims)
        is_seen = look is not None and look.exam.asked_ns >= found.ready_ns
        is_peer_seen = any(is_answered(scene, other, found.ready_ns) for other in blamed.waiting if other != rank)
        return (is_late or (is_seen and (is_peer_seen or not blamed.victims))) and has_stayed(scene, rank)

    def _second_looks(
        self, scene: Standstill, blamed: Blame, dues: dict[int, Due], *, is_large: bool
    ) -> Iterator[ExamRequest]:
        """Ask for a look when a culprit's time is up.

        Ask again later if it was seen to move although its phase did not change.
        """
        others = blamed.victims[:MAX_VICTIMS_SEEN] if is_large else tuple(scene.living)
        for rank, found in sorted(dues.items(), key=lambda item: (item[1].ready_ns, item[0]))[:MAX_CULPRITS_SEEN]:
            asked_ns, look = found.ready_ns, scene.looks.get(rank)
            if look is not None and look.exam.asked_ns >= asked_ns and not has_stayed(scene, rank):
                delay = scene.delay(rank)
                pause_s = max(self.suspended_s, delay.overdue.deadline_s if delay else 0.0)
                asked_ns = look.exam.asked_ns + round(pause_s * SECOND)
            if scene.now_ns >= asked_ns:
                yield from self._requests(scene, {rank, *others}, asked_ns, blamed)

    def _fresh_looks(self, scene: Standstill, blamed: Blame | None, *, is_large: bool) -> Iterator[ExamRequest]:
        """Ask for another look at all ranks when one came to a stop or became overdue since its last look.

        After that, ask at longer intervals.
        """
        is_waited_for = blamed is not None and bool(blamed.waiting)
        if is_large and is_waited_for:
            return
        looked_ns = max((scene.looked_ns(rank) for rank in scene.living), default=0)
        if looked_ns < scene.asked_ns:
            return
        delays = [(rank, delay) for rank, delay in scene.window.processes.delays.items() if rank in scene.living]
        unseen = [one.at_ns for rank, one in delays if scene.looked_ns(rank) < one.at_ns - APART_NS]
        overdue_s = [one.overdue.deadline_s for _, one in delays if one.overdue.tier == "overdue"]
        doubled_ns = 2 * looked_ns - scene.began_ns
        soonest_ns = doubled_ns if is_large else looked_ns + APART_NS
        moments = [max(min(unseen), soonest_ns)] if unseen else []
        if overdue_s:
            later_ns = looked_ns + round(max(self.suspended_s, *overdue_s) * SECOND)
            moments.append(max(later_ns, doubled_ns) if is_large or is_waited_for else later_ns)
            if blamed is not None:
                moments += _undecided(scene, blamed, looked_ns)
        if moments and scene.now_ns >= min(moments):
            yield from self._requests(scene, scene.living, min(moments), blamed)

    def _requests(
        self, scene: Standstill, ranks: Iterable[int], asked_ns: int, blamed: Blame | None
    ) -> Iterator[ExamRequest]:
        """Ask for quick looks, but with native frames at blamed ranks that only these can explain."""
        looks = {rank: scene.looks.get(rank) for rank in (blamed.culprits[:MAX_CULPRITS_SEEN] if blamed else ())}
        deep = {
            rank for rank, look in looks.items() if look and (look.activity == "compute" or not look.has_native_frames)
        }
        wanted = set(ranks)
        yield self._request(scene, wanted & deep, asked_ns, "native")
        yield self._request(scene, wanted - deep, asked_ns, "quick")

    @staticmethod
    def _request(scene: Standstill, ranks: Iterable[int], asked_ns: int, depth: ExamDepth) -> ExamRequest:
        """Make a request for those of the ranks that live and have not answered."""
        open_ones = (rank for rank in ranks if rank in scene.living and not is_answered(scene, rank, asked_ns))
        return ExamRequest(asked_ns, depth, tuple(sorted(open_ones)))

    def _suspicion(self, scene: Standstill, needs: Sequence[ExamRequest]) -> Finding:
        ranks = tuple(sorted(rank for rank in scene.window.processes.delays if rank in scene.living))
        steps = [scene.step(rank) for rank in ranks]
        return Finding(
            detector=self.name,
            severity="info",
            first_step=min(steps),
            detected_step=max(steps),
            ranks=ranks,
            summary=f"{ranks_text(ranks).capitalize()} stand{'s' if len(ranks) == 1 else ''} still for longer than usual; all ranks are being looked at.",
            needs=tuple(needs),
        )

    def _finding(self, scene: Standstill, blamed: Blame, dues: dict[int, Due]) -> Finding:
        step = min(scene.step(rank) for rank in blamed.culprits)
        first = min((dues[rank] for rank in blamed.culprits), key=lambda found: found.ready_ns)
        place = blamed.place
        return Finding(
            detector=self.name,
            severity=_severity(scene, blamed),
            first_step=step,
            detected_step=max(step, *(scene.step(rank) for rank in scene.window.processes.delays)),
            ranks=blamed.culprits,
            summary=stall_summary(scene, blamed, first.ready_ns),
            facts=_facts(scene, blamed) | {"overdue_at_ns": first.overdue_ns, "began_at_ns": _began_ns(scene, blamed)},
            evidence=tuple(stall_evidence(scene, blamed, first)),
            collective=Collective(group=group_of(place), sequence=place.sequence, operation=place.operation)
            if place
            else None,
        )


def _began_ns(scene: Standstill, blamed: Blame) -> int | None:
    """Return when the first culprit last moved; None if nobody saw it."""
    delays = scene.window.processes.delays
    return min((delays[rank].moved_ns for rank in blamed.culprits if rank in delays), default=None)


def _facts(scene: Standstill, blamed: Blame) -> dict[str, Any]:
    """Return the facts about the first culprit: True, False, or None if nobody could look."""
    culprit = Culprit(scene, blamed, blamed.culprits[0])
    is_waiting = blamed.wait is not None and culprit.rank in blamed.wait.entered
    return {
        "is_suspended": culprit.is_suspended,
        "is_uninterruptible": culprit.is_uninterruptible,
        "is_process_normal": culprit.is_process_normal,
        "is_unreachable": blamed.by == "unreachable",
        "has_answered": culprit.look is not None,
        "has_ended": culprit.rank in scene.ended,
        "has_died": culprit.rank in scene.ended and kind_of(scene.ended[culprit.rank]) != "ordinary",
        "is_interpreter_locked": culprit.is_interpreter_locked,
        "is_lock_free": culprit.is_lock_free,
        "is_in_data": culprit.is_in("data"),
        "is_in_checkpoint": culprit.is_in("checkpoint"),
        "is_saving": culprit.is_saving,
        "is_in_script": culprit.is_in("script"),
        "is_cpu_moving": culprit.is_cpu_moving,
        "is_elsewhere": culprit.is_elsewhere,
        "is_perhaps_order": blamed.deviation is not None and blamed.deviation.alternative == "order",
        "has_entered": None if blamed.analysis is None else is_waiting,
        "has_stack": culprit.has_stack,
        "has_flight": blamed.analysis is not None,
        "is_culprit_clear": blamed.is_clear,
        "is_everyone_stuck": not blamed.victims,
        "is_deadlock": blamed.is_deadlock,
    }


def _severity(scene: Standstill, blamed: Blame) -> Severity:
    """Return `warning` if nobody waits, if a person works with a debugger, and before the first step; otherwise `critical`."""
    is_stuck_alone = not blamed.victims and not blamed.is_deadlock
    looks = [look for rank in blamed.culprits if (look := scene.looks.get(rank))]
    is_debugged = any(look.exam.process is not None and look.exam.process.state == "traced" for look in looks)
    return "warning" if is_stuck_alone or is_debugged or scene.is_before_first_step else "critical"


def _is_hang(scene: Standstill, blamed: Blame) -> bool:
    """Whether a rank waits, a process is held, or no rank at all goes on; at the end of a job nobody waits."""
    if blamed.waiting or blamed.by == "suspended":
        return True
    return not scene.ended and all(scene.overdue(rank) is not None for rank in scene.living)


def _undecided(scene: Standstill, blamed: Blame, looked_ns: int) -> Iterator[int]:
    """Yield when to look again at what may be one long operation or a loop of short ones: only several looks show which."""
    for rank in blamed.culprits:
        look, delay = scene.looks.get(rank), scene.overdue(rank)
        if look is None or delay is None or look.activity != "compute" or look.is_cpu_moving is False:
            continue
        if looked_ns < delay.at_ns + COMPUTING_S * SECOND:
            yield max(looked_ns, delay.at_ns) + APART_NS


def _is_seen_twice(scene: Standstill, rank: int) -> bool:
    look = scene.looks[rank]
    return scene.delay(rank) is not None or look.before is not None


def _is_leaving(window: Window, rank: int) -> bool:
    """Whether it has just reported that an exception ends it: those who wait for it wait for its end, which says more."""
    said_ns = window.processes.failing.get(rank)
    is_gone = any(end.rank == rank for end in window.processes.exits)
    return said_ns is not None and not is_gone and 0 <= window.now_ns - said_ns < LEAVING_S * SECOND


def _gave_up(window: Window, broken: RankExit) -> RankExit | None:
    """Return the rank whose backend's timeout ran out, if that is why the first rank ended."""
    ends = (end for end in window.processes.exits if end.at_ns - broken.at_ns <= SECOND)
    return next((end for end in ends if kind_of(end) == "timed_out"), None)


def _as_of(window: Window, now_ns: int) -> Window:
    """Return what was known at an earlier moment, as far as it is still kept."""
    known = window.processes
    exits = tuple(end for end in known.exits if end.at_ns < now_ns)
    exams = {rank: tuple(seen for seen in exams if seen.at_ns <= now_ns) for rank, exams in known.exams.items()}
    then = dataclasses.replace(known, exits=exits, exams={rank: seen for rank, seen in exams.items() if seen})
    return dataclasses.replace(window, now_ns=min(now_ns, window.now_ns), real_ns=0, processes=then)
