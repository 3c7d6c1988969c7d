"""What a dead rank left behind: how it ended, its last statistics, collectives and stack, and who fell after it."""

import math
from collections.abc import Iterator, Sequence

import msgspec

from holter.faults.hangs import stacks
from holter.faults.hangs.endings import how, signal_name, signal_of
from holter.faults.shared import collectives
from holter.faults.window import Examined, RankExit, Window
from holter.records import Evidence, Exam, Flight

MAX_VICTIMS = 4
"""More than these are counted, not listed."""
MIN_AGE_S = 0.05
"""A younger copy is as good as of the moment itself."""


def death(end: RankExit) -> Evidence:
    """How one process ended."""
    exited, said = end.exited, end.exited.farewell
    number = signal_of(end)
    where = f", raised at {said.where}" if said and said.where and said.kind != "exit" else ""
    return Evidence(
        kind="process_exit",
        summary=f"rank {end.rank} (pid {exited.pid}) {how(end)}{where}; last seen in step {exited.last_step}, {exited.last_phase.name.lower()}",
        values={
            "rank": end.rank,
            "pid": exited.pid,
            "exit_code": exited.exit_code,
            "signal": signal_name(number) if number is not None else None,
            "out_of_memory": exited.out_of_memory,
            "farewell": said.text if said else None,
            "where": said.where if said else None,
            "last_step": exited.last_step,
            "last_phase": exited.last_phase.name.lower(),
            "at_ns": end.at_ns,
        },
    )


def victims_of(first: RankExit, victims: Sequence[RankExit]) -> Iterator[Evidence]:
    """Who fell after it, or was seen to fall before although it was its doing."""
    for end in victims[:MAX_VICTIMS]:
        after_s = (end.at_ns - first.at_ns) / 1e9
        order = f"{after_s:.1f} s later" if after_s >= 0 else f"seen {-after_s:.1f} s earlier, but brought about by it"
        yield Evidence(
            kind="process_exit",
            summary=f"rank {end.rank} {how(end)}, {order}",
            values={"rank": end.rank, "after_s": after_s, "victim": True},
        )
    if len(victims) > MAX_VICTIMS:
        num_more = len(victims) - MAX_VICTIMS
        summary = f"and {num_more} more ranks after it"
        yield Evidence(kind="process_exit", summary=summary, values={"num_more": num_more})


def last_seen(window: Window, rank: int) -> Iterator[Evidence]:
    """Its last statistics, collectives and stack, each from the newest look that has it."""
    seen = window.processes.exams.get(rank, ())
    if (one := _newest(seen, "statistics")) is not None:
        yield _statistics(rank, one)
    flights = [one.exam.flight for one in seen if one.exam.flight is not None]
    if flights:
        yield _calls(rank, max(flights, key=lambda flight: flight.taken_ns), seen)
    if (one := _newest(seen, "stacks")) is not None and (stack := stacks.evidence({rank: one})) is not None:
        yield stack


def _calls(rank: int, flight: Flight, seen: Sequence[Examined]) -> Evidence:
    """A killed rank's are as of the last copy: how long before its end was seen is said."""
    found = collectives.last_calls(rank, flight)
    age_s = (seen[-1].observed_ns - flight.taken_ns) / 1e9 if seen[-1].observed_ns and flight.taken_ns else 0.0
    if age_s < MIN_AGE_S:
        return found
    summary = f"{found.summary}; as of {age_s:.1f} s before its end was seen"
    return msgspec.structs.replace(found, summary=summary, values=found.values | {"age_s": round(age_s, 3)})


def _newest(seen: Sequence[Examined], part: str) -> Exam | None:
    return next((one.exam for one in reversed(seen) if getattr(one.exam, part)), None)


def _statistics(rank: int, exam: Exam) -> Evidence:
    known = {name: value for name, value in exam.statistics.items() if math.isfinite(value)}
    said = ", ".join(f"{name.replace('_', ' ')} {value:.6g}" for name, value in exam.statistics.items())
    return Evidence(
        kind="last_statistics",
        summary=f"the last that rank {rank} said of itself: {said}",
        values={"rank": rank} | known,
    )
