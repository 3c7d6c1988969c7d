"""How a rank's process ended, and what it left behind.

An end was meant, or a peer's death brought it about, or it is a death of its own. Left behind are its last statistics, collectives and
stack.
"""

import math
import signal
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from holter.faults.hangs import stacks
from holter.faults.shared import collectives
from holter.faults.window import Examined, RankExit, Window
from holter.records import EXIT_CODE, Evidence, Exam, Flight

EndingKind = Literal[
    "ordinary", "terminated", "connection_lost", "timed_out", "signal", "exception", "exit_code", "unknown"
]
VICTIMS: tuple[EndingKind, ...] = ("terminated", "connection_lost", "timed_out")
"""Ends that a peer's death, or its absence, brings about."""
MEANT_CODES = (EXIT_CODE, 128 + signal.SIGINT)
"""Halted by decision, and Ctrl-C as a shell counts it."""
EXIT_DONE = "os._exit(0)"
"""Last words of a process that leaves past Python's own end, and is content."""
LOST_CONNECTION = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "socket closed",
    "remote process exited",
    "unhandled system error",
    "connectfull",
    "no longer alive",
    "ncclremoteerror",
    "received errors while waiting for send/recv",
)
"""What gloo, NCCL and the store say when a peer is gone, in lower case."""
TIMED_OUT = (
    "for recv operation to complete",
    "for send operation to complete",
    "failed to pass monitoredbarrier",
    "collective operation timeout",
    "nccl timeout",
    "nccl operations have failed or timed out",
    "diststoreerror",
)
"""What they say when a peer has not come in time: only the backend's own words, for a download may time out as well."""
MAX_VICTIMS = 4
"""More than these are counted, not listed."""
MIN_AGE_S = 0.05
"""A younger copy is as good as of the moment itself."""


def kind_of(end: RankExit) -> EndingKind:
    """How the process ended."""
    said, code, number = end.exited.farewell, end.exited.exit_code, signal_of(end)
    if code == 0 or is_meant(end):
        return "ordinary"
    is_terminated = number == signal.SIGTERM or code == 128 + signal.SIGTERM
    # SIGTERM may have come while an exception was ending it.
    if said and said.kind == "exception" and (is_terminated or number is None):
        return _kind_of_exception(said.text.lower())
    if is_terminated:
        return "terminated"
    if number is not None:
        return "signal"
    if code is not None or (said and said.kind == "exit" and said.text != EXIT_DONE):
        return "exit_code"
    return "ordinary" if said else "unknown"


def _kind_of_exception(text: str) -> EndingKind:
    if any(words in text for words in LOST_CONNECTION):
        return "connection_lost"
    return "timed_out" if any(words in text for words in TIMED_OUT) else "exception"


def is_meant(end: RankExit) -> bool:
    """A person or a decision of ours stopped it before it was done."""
    said = end.exited.farewell
    return (
        signal_of(end) == signal.SIGINT
        or end.exited.exit_code in MEANT_CODES
        or bool(said and said.kind == "interrupt")
    )


def signal_of(end: RankExit) -> int | None:
    """The signal that ended it, if one did."""
    if end.exited.signal:
        return end.exited.signal
    code = end.exited.exit_code
    return -code if code is not None and code < 0 else None


def signal_name(number: int) -> str:
    """`SIGKILL`."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def is_same_exception(one: RankExit, other: RankExit) -> bool:
    """The same text, or the same type from the same line: messages often hold the rank's own number."""
    a, b = one.exited.farewell, other.exited.farewell
    if not a or not b or a.kind != "exception" or b.kind != "exception" or kind_of(one) != kind_of(other):
        return False
    is_same_place = bool(a.where) and a.where == b.where
    return a.text == b.text or (is_same_place and a.text.partition(":")[0] == b.text.partition(":")[0])


def how(end: RankExit) -> str:
    """`ended by SIGKILL`, `ended with ValueError: ...`, `ended with exit code 3`."""
    number, code, said = signal_of(end), end.exited.exit_code, end.exited.farewell
    if number is not None and kind_of(end) in {"signal", "terminated"}:
        return f"ended by {signal_name(number)}" + (
            " (out of memory, says the kernel)" if end.exited.out_of_memory else ""
        )
    if said and said.kind == "exception":
        return f"ended with {_first_line(said.text)}"
    called = f", os._exit called at {said.where}" if said and said.kind == "exit" and said.where else ""
    if code is not None:
        return f"ended with exit code {code}{called}"
    return f"ended by {said.text}{called}" if said and said.kind == "exit" else "ended without last words"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "an exception"


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
    """Ranks that ended because of it, some of which may have been seen to end earlier."""
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
    """Its last calls. A killed rank's are from the last copy: how old that was is said."""
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
