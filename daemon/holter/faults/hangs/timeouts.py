"""Whom a rank was waiting for that gave up: a backend's timeout proves that somebody was missing, and is raised by the one that waited.

    named       monitored_barrier says who did not come
    recorders   the last copies of the ranks' recorders: who has not entered what the others wait in
    left_over   everyone else gave up, or lost its connections over it

The first line that answers counts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from holter.faults.hangs.death_evidence import death, last_seen, victims_of
from holter.faults.hangs.endings import how, kind_of
from holter.faults.shared import collectives
from holter.faults.shared.wording import ranks_text
from holter.faults.window import RankExit, Window
from holter.flight import Analysis
from holter.records import Evidence, Flight

NAMED = re.compile(r"\branks? (\d+(?:, *\d+)*) failed to pass monitoredbarrier", re.IGNORECASE)
FALLEN = ("timed_out", "connection_lost")
"""Ends of ranks that waited."""
MAX_SHOWN = 4
"""Missing ranks whose last doings are shown."""


@dataclass(frozen=True)
class Missing:
    """Who did not come, as far as can be told."""

    ranks: tuple[int, ...] = ()
    by: Literal["named", "recorders", "left_over", "nothing"] = "nothing"
    analysis: Analysis | None = None


def missing(window: Window, gave_up: RankExit) -> Missing:
    """Whom this rank waited for."""
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


def summary(gave_up: RankExit, found: Missing) -> str:
    """One sentence."""
    whom = ranks_text(found.ranks) if found.ranks else "its peers"
    step, phase = gave_up.exited.last_step, gave_up.exited.last_phase.name.lower()
    said = f"Rank {gave_up.rank} waited for {whom} in vain and {how(gave_up)} at step {step}, in phase {phase}"
    return f"{said}." if found.ranks else f"{said}; which of them was missing is not known."


def evidence(window: Window, gave_up: RankExit, found: Missing, abnormal: list[RankExit]) -> Iterator[Evidence]:
    """The end of the one that waited, what the missing ones last did, and who else fell."""
    yield death(gave_up)
    if found.analysis is not None:
        yield from collectives.evidence(found.analysis, (gave_up.rank,), _flights(window))
    for rank in found.ranks[:MAX_SHOWN]:
        yield from last_seen(window, rank)
    yield from victims_of(gave_up, [end for end in abnormal if end.rank != gave_up.rank])


def _flights(window: Window) -> dict[int, Flight]:
    """Of each rank the newest; of one that gave up, from before that: a call that has failed looks like one that is over."""
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
    return any(not collectives.is_over(call) for call in flight.calls)
