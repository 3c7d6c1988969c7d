"""Dead rank: a rank's process ended, and not because it was done.

What it detects
    The first rank to end abnormally: by a signal, with an exception, with an exit code other than 0, or without a word; or the first to
    leave without an error, if a peer that still needed it says that it lost its connection. Ranks that fell afterwards are told apart:
    the launcher sends SIGTERM to the survivors, and peers raise errors about a closed connection. A rank that gave up because its
    backend's timeout was over is a victim, too: the finding names the rank that it waited for, or nobody.
    An exception of the script's own, and `sys.exit` with a code other than 0, are the script's doing: a warning with the script's line.
    A crash while Python shuts down is a warning too, if every rank's script had come to its end: nothing but the exit code is lost.

Why it matters
    The survivors' logs are full of connection errors that point at each other. Only the first death has a cause worth finding.

False positives
    An ordinary end, Ctrl-C, and SIGTERM to all ranks (a scheduler or a person stopped the job) are no faults: where SIGTERM ended the
    first, the others have half a minute to save and to follow. A script that ends its ranks by `os._exit` with a code other than 0 is
    reported. A rank that is done earlier than others is not, unless one of them fails over it.

What to do
    Look at the named rank's own log and at the kernel's log of its host at that moment, and at no other rank. SIGKILL with nobody who
    sent it is most often the kernel's out-of-memory killer; SIGSEGV, SIGBUS and SIGABRT come from native code.
"""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from holter.faults.hangs.endings import (
    CRASHES,
    VICTIMS,
    death,
    has_finished,
    how,
    is_meant,
    is_same_exception,
    kind_of,
    last_seen,
    own_error,
    own_line,
    script_lines,
    signal_of,
    victims_of,
)
from holter.faults.shared import collectives
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import ranks_text
from holter.faults.window import RankExit, Window
from holter.flight import Analysis, is_over
from holter.records import Collective, Evidence, Finding, Flight

MAX_SHOWN = 4
"""Number of ranks that died alike, or were missing, whose last actions are shown."""
NAMED = re.compile(r"\branks? (\d+(?:, *\d+)*) failed to pass monitoredbarrier", re.IGNORECASE)
KILLED_WORKER = ("signal: Killed", "signal: Bus error")
FALLEN = ("timed_out", "connection_lost")
"""Ends of ranks that waited."""


@dataclass(frozen=True)
class DeadRank:
    """Judges which rank died first."""

    name: ClassVar[str] = "dead_rank"

    settle_s: float = threshold(1.0, at_least=0)
    """Seconds to wait after the first abnormal end, so that the true first one is known."""
    reorder_s: float = threshold(1.0, at_least=0)
    """Seconds by which a peer's lost connection may be seen earlier than the death that closed it."""
    together_s: float = threshold(0.5, at_least=0)
    """Seconds: if all ranks end without a word within this time, they may have been stopped from outside."""
    stop_s: float = threshold(30.0, at_least=0)
    """Seconds after SIGTERM ended a rank for which the others may live on, to save and then end: schedulers grant as much."""
    left_s: float = threshold(60.0, at_least=0)
    """Seconds after a rank left without an error within which a peer may notice that it is gone."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first death; all later ones are its victims."""
        abnormal = sorted(
            (end for end in window.processes.exits if kind_of(end) != "ordinary"), key=lambda end: (end.at_ns, end.rank)
        )
        if not abnormal:
            return
        is_everyone_gone = window.attached <= {end.rank for end in window.processes.exits}
        if not is_everyone_gone and window.now_ns - abnormal[0].at_ns < self.settle_s * 1e9:
            return
        if self._is_called_off(window.processes.exits, abnormal[0]):
            return
        if _is_stop(window, abnormal, stop_s=self.stop_s, settle_s=self.settle_s):
            return
        culprits = self._culprits(abnormal, window.processes.exits)
        is_done = signal_of(culprits[0]) in CRASHES and all(has_finished(end) for end in window.processes.exits)
        if is_done and not is_everyone_gone and self._may_still_follow(window, culprits[0]):
            return
        if kind_of(culprits[0]) == "timed_out":
            yield _given_up(window, culprits[0], abnormal)
            return
        is_unclear = (
            is_everyone_gone and self._are_together(abnormal) and all(kind_of(end) == "unknown" for end in abnormal)
        )
        known = {
            "is_everyone_gone": is_everyone_gone,
            "is_order_clear": not is_unclear or len(abnormal) == 1,
            "is_done": is_done and is_everyone_gone,
        }
        yield _finding(window, culprits, abnormal, known)

    def _may_still_follow(self, window: Window, first: RankExit) -> bool:
        """Whether the others may be about to end too.

        A crash at the very end matters only if it keeps one of them from its own end.
        """
        is_soon = (window.real_ns or window.now_ns) - first.at_ns < self.stop_s * 1e9
        return is_soon and not window.processes.failing and not _goes_on(window, first, self.settle_s)

    def _is_called_off(self, ends: tuple[RankExit, ...], first: RankExit) -> bool:
        """Whether Ctrl-C or a decided halt came first: what the other ranks reported after it is no fault."""
        slack_ns = self.reorder_s * 1e9 if kind_of(first) in VICTIMS else 0
        return any(is_meant(end) and end.at_ns <= first.at_ns + slack_ns for end in ends)

    def _are_together(self, ends: list[RankExit]) -> bool:
        return ends[-1].at_ns - ends[0].at_ns <= self.together_s * 1e9

    def _culprits(self, ends: list[RankExit], everyone: tuple[RankExit, ...]) -> list[RankExit]:
        first = ends[0]
        if kind_of(first) in VICTIMS:
            soon = [end for end in ends if end.at_ns - first.at_ns <= self.reorder_s * 1e9]
            gave_up = next((end for end in soon if kind_of(end) == "timed_out"), first)
            first = next((end for end in soon if kind_of(end) not in VICTIMS), gave_up)
        if kind_of(first) in {"connection_lost", "timed_out"}:
            first = self._left_by(first, everyone) or first
        if kind_of(first) not in {"exception", "connection_lost"} and not own_error(first):
            return [first]
        return [first, *(end for end in ends if end.rank != first.rank and is_same_exception(first, end))]

    def _left_by(self, lost: RankExit, ends: tuple[RankExit, ...]) -> RankExit | None:
        """Return the rank that left quietly while this rank still needed it, or None."""
        for end in ends:
            before_s = (lost.at_ns - end.at_ns) / 1e9
            # A timeout may be of any length.
            is_then = -self.reorder_s <= before_s and (kind_of(lost) == "timed_out" or before_s <= self.left_s)
            is_early = end.exited.last_step <= lost.exited.last_step
            if end.rank != lost.rank and kind_of(end) == "ordinary" and not is_meant(end) and is_then and is_early:
                return end
        return None


def _given_up(window: Window, gave_up: RankExit, abnormal: list[RankExit]) -> Finding:
    """Make a finding for a rank whose backend gave up, which proves that another was missing.

    The rank that waited is not blamed.
    """
    found, step = _missing(window, gave_up), gave_up.exited.last_step
    wait = found.analysis.blocking if found.analysis else None
    return Finding(
        detector=DeadRank.name,
        severity="critical",
        first_step=step,
        detected_step=step,
        ranks=found.ranks,
        summary=_timeout_summary(gave_up, found),
        facts={
            "is_timed_out": True,
            "is_absent_seen": found.by in {"named", "recorders"},
            "is_absent_known": bool(found.ranks),
            "is_everyone_gone": window.attached <= {end.rank for end in window.processes.exits},
        },
        evidence=tuple(_timeout_evidence(window, gave_up, found, abnormal)),
        collective=Collective(group=collectives.group_of(wait), sequence=wait.sequence, operation=wait.operation)
        if wait
        else None,
    )


def _finding(window: Window, culprits: list[RankExit], abnormal: list[RankExit], known: dict[str, bool]) -> Finding:
    first = culprits[0]
    kind, own = kind_of(first), own_error(first)
    ranks = tuple(sorted(end.rank for end in culprits))
    victims = [end for end in abnormal if end.rank not in ranks]
    number = signal_of(first)
    return Finding(
        detector=DeadRank.name,
        severity="warning" if own == "script" or known["is_done"] else "critical",
        first_step=first.exited.last_step,
        detected_step=first.exited.last_step,
        ranks=ranks,
        summary=_summary(first, ranks),
        facts={
            "is_own_error": own == "script",
            "is_done": known["is_done"],
            "is_order_clear": known["is_order_clear"],
            "is_everyone_gone": known["is_everyone_gone"],
            "is_signal": kind in {"signal", "terminated"},
            "is_killed": number == signal.SIGKILL,
            "is_terminated": kind == "terminated",
            "is_exception": kind in {"exception", "connection_lost"},
            "is_connection_lost": kind == "connection_lost",
            "is_status_known": kind != "unknown",
            "has_earlier_death": any(end.at_ns < first.at_ns and kind_of(end) not in VICTIMS for end in victims),
            "is_out_of_memory": own == "memory" or first.exited.out_of_memory,
            "is_worker_lost": own == "worker",
            "is_in_data": True if own == "worker" else None,
            "is_beyond_return": True,
            "is_worker_killed": own == "worker" and _is_killed_worker(first),
            "is_on_several_ranks": len(ranks) > 1,
        },
        evidence=tuple(_evidence(window, culprits, victims)),
    )


def _summary(first: RankExit, ranks: tuple[int, ...]) -> str:
    """Return one sentence; for an error of the script itself, its line comes first."""
    step, phase, line = first.exited.last_step, first.exited.last_phase.name.lower(), own_line(first)
    if own_error(first) == "script" and line:
        return f"{line.partition(': ')[0]}: {ranks_text(ranks)} {how(first, short=True)} at step {step}."
    return f"{ranks_text(ranks).capitalize()} {how(first)} at step {step}, in phase {phase}."


def _evidence(window: Window, culprits: list[RankExit], victims: list[RankExit]) -> Iterator[Evidence]:
    """Yield the script's own line first; ranks that ended alike share one piece of evidence."""
    first, ranks = culprits[0], sorted(end.rank for end in culprits)
    if own_error(first) and own_line(first):
        yield script_lines(first, ranks)
    yield from (death(alike) for alike in _alike(culprits))
    yield from victims_of(first, victims)
    if own_error(first) != "script":
        yield from (proof for end in culprits[:MAX_SHOWN] for proof in last_seen(window, end.rank))


def _alike(ends: list[RankExit]) -> Iterator[list[RankExit]]:
    """Yield groups of ranks that one sentence describes."""
    groups: dict[str, list[RankExit]] = {}
    for end in ends:
        groups.setdefault(how(end), []).append(end)
    yield from groups.values()


def _is_killed_worker(end: RankExit) -> bool:
    """Whether its worker was ended by a signal that the kernel sends when memory, main or shared, runs out."""
    said = end.exited.farewell
    return said is not None and any(words in said.text for words in KILLED_WORKER)


def _is_stop(window: Window, abnormal: list[RankExit], *, stop_s: float, settle_s: float) -> bool:
    """Whether this is a stop from outside: SIGTERM to all ranks, which end one after the other, some after a save.

        rank 0   SIGTERM ---- saves in its own handler ---- exit code 0
        rank 1   SIGTERM, dead                                                one stop, no death

    One single rank that gets SIGTERM looks the same at first. It is a death if its peers go on, fail because of it, or live on
    for long.
    """
    first = abnormal[0]
    if not any(kind_of(end) == "terminated" for end in abnormal):
        return False
    if not all(_was_asked_to_end(window, end, first, settle_s) for end in abnormal):
        return False
    if _goes_on(window, first, settle_s) or any(
        not _was_signalled_before(window, rank, first) for rank in window.processes.failing
    ):
        return False
    is_everyone_gone = window.attached <= {end.rank for end in window.processes.exits}
    return is_everyone_gone or (window.real_ns or window.now_ns) - first.at_ns < stop_s * 1e9


def _was_asked_to_end(window: Window, end: RankExit, first: RankExit, settle_s: float) -> bool:
    """Whether SIGTERM asked this rank to end.

    A rank that lost its peers must have been asked before. One that does not obey is killed later.
    """
    if kind_of(end) == "terminated":
        return True
    if kind_of(end) in VICTIMS:
        return _was_signalled_before(window, end.rank, first)
    is_cleared = signal_of(end) == signal.SIGKILL and not end.exited.out_of_memory
    return is_cleared and end.at_ns - first.at_ns > settle_s * 1e9


def _was_signalled_before(window: Window, rank: int, first: RankExit) -> bool:
    return rank in window.processes.signalled and window.processes.signalled[rank] <= first.at_ns


def _goes_on(window: Window, first: RankExit, settle_s: float) -> bool:
    """Whether its peers completed a step without it."""
    return any(view.first_seen_ns > first.at_ns + settle_s * 1e9 for view in window.steps)


@dataclass(frozen=True)
class Missing:
    """The ranks that did not come, as far as is known."""

    ranks: tuple[int, ...] = ()
    by: Literal["named", "recorders", "left_over", "nothing"] = "nothing"
    analysis: Analysis | None = None


def _missing(window: Window, gave_up: RankExit) -> Missing:
    """Return the ranks for which a rank waited until its backend's timeout, which proves that one was missing.

    The first line that gives an answer counts:

    named       monitored_barrier says who did not come
    recorders   the last copies of the ranks' recorders: who has not entered what the others wait in
    left_over   everyone else gave up, or lost its connections over it
    """
    said = gave_up.exited.farewell
    found = NAMED.search(said.text) if said else None
    if found:
        return Missing(tuple(sorted(map(int, found[1].split(",")))), "named")
    analysis = collectives.analysed(_flights(window), window.world_size)
    if gave_up.rank in analysis.victims:
        absent = set(analysis.culprits) - set(analysis.outdated)
        if absent:
            return Missing(tuple(sorted(absent)), "recorders", analysis)
    fallen = {end.rank for end in window.processes.exits if kind_of(end) in FALLEN}
    rest = window.attached - fallen
    is_whole = len(window.attached) == window.world_size
    return Missing(tuple(rest), "left_over") if is_whole and len(rest) == 1 else Missing()


def _timeout_summary(gave_up: RankExit, found: Missing) -> str:
    """Return the summary in one sentence."""
    whom = ranks_text(found.ranks) if found.ranks else "its peers"
    step, phase = gave_up.exited.last_step, gave_up.exited.last_phase.name.lower()
    said = f"Rank {gave_up.rank} waited for {whom} in vain and {how(gave_up)} at step {step}, in phase {phase}"
    return f"{said}." if found.ranks else f"{said}; which of them was missing is not known."


def _timeout_evidence(
    window: Window, gave_up: RankExit, found: Missing, abnormal: list[RankExit]
) -> Iterator[Evidence]:
    """Yield the end of the rank that waited, what the missing ones last did, and which other ranks ended."""
    yield death([gave_up])
    if found.analysis is not None:
        yield from collectives.evidence(found.analysis, (gave_up.rank,), _flights(window))
    for rank in found.ranks[:MAX_SHOWN]:
        yield from last_seen(window, rank)
    yield from victims_of(gave_up, [end for end in abnormal if end.rank != gave_up.rank])


def _flights(window: Window) -> dict[int, Flight]:
    """Return each rank's newest copy; of one that gave up, a copy from before.

    A failed call looks like one that is over.
    """
    fallen = {end.rank for end in window.processes.exits if kind_of(end) in FALLEN}
    known = {
        rank: sorted((one.exam.flight for one in seen if one.exam.flight), key=lambda flight: flight.taken_ns)
        for rank, seen in window.processes.exams.items()
    }
    return {
        rank: next((flight for flight in reversed(flights) if rank in fallen and _is_waiting(flight)), flights[-1])
        for rank, flights in known.items()
        if flights
    }


def _is_waiting(flight: Flight) -> bool:
    return any(not is_over(call) for call in flight.calls)
