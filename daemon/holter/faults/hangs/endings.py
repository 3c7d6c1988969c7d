"""How a rank's process ended, and what it left behind.

An end is intended, caused by a peer's death, or a death of its own. A rank leaves behind its last statistics, collectives
and stack.
"""

import math
import re
import signal
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from holter.faults.hangs import stacks
from holter.faults.shared import collectives, device_notes
from holter.faults.shared.wording import ranks_text
from holter.faults.window import Examined, RankExit, Window
from holter.records import EXIT_CODE, LEFT, Evidence, Exam, Flight

EndingKind = Literal[
    "ordinary", "terminated", "connection_lost", "timed_out", "signal", "exception", "exit_code", "unknown"
]
OwnError = Literal["", "script", "memory", "worker"]
VICTIMS: tuple[EndingKind, ...] = ("terminated", "connection_lost", "timed_out")
"""Ends that a peer's death or absence causes."""
MEANT_CODES = (EXIT_CODE, 128 + signal.SIGINT)
"""Exit codes of intended ends: halted by decision, and Ctrl-C as a shell reports it."""
EXIT_DONE = "os._exit(0)"
"""Last words of a process that exits bypassing Python's own end, without an error."""
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
"""What gloo, NCCL and the store report when a peer is gone, in lower case."""
TIMED_OUT = (
    "for recv operation to complete",
    "for send operation to complete",
    "failed to pass monitoredbarrier",
    "collective operation timeout",
    "nccl timeout",
    "nccl operations have failed or timed out",
    "diststoreerror",
)
"""What they report when a peer has not come in time; only the backend's own words, because a download may time out as
well."""
OUT_OF_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory: you tried to allocate",
    "cuda out of memory",
    "hip out of memory",
    "xpu out of memory",
    "backend out of memory",
    "cuda error: out of memory",
    "cublas_status_alloc_failed",
    "unable to allocate shared memory",
)
"""What torch, the drivers and the kernel report when an allocation failed; not needed if the exception's type says it."""
OF_A_DEVICE = ("cuda error:", "hip error:", "cudnn error", "device lost", "acceleratorerror")
"""What a device's driver reports: the script's line is only where it was noticed. An assertion in a kernel is the
script's own error."""
LOST_WORKER = ("dataloader worker (pid",)
"""What torch reports when a loader's worker process is gone; an exception raised in a worker begins differently."""
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that native code raises by itself."""
SCRIPT_DONE = ("", "sys.exit(0)", "sys.exit(None)")
"""Last words of a script that came to its end without an error."""
MAX_VICTIMS = 4
"""More victims than these are counted, not listed."""
PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+) in ")
MIN_AGE_S = 0.05
"""Seconds: a younger copy counts as taken at the moment itself."""


def kind_of(end: RankExit) -> EndingKind:
    """Return how the process ended."""
    said, code, number = end.exited.farewell, end.exited.exit_code, signal_of(end)
    if code == 0 or is_meant(end) or has_left(end):
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


def own_error(end: RankExit) -> OwnError:
    """Return what kind of error the rank ended itself with; empty if it was ended by others, a device or the backend."""
    said = end.exited.farewell
    if kind_of(end) == "exit_code":
        # Python ended normally with a code such as 3: `sys.exit(3)`, whoever called it.
        return "script" if said and said.kind == "end" else ""
    if kind_of(end) != "exception" or said is None:
        return ""
    text, name = said.text.lower(), said.text.partition(":")[0].lower()
    if name.endswith("memoryerror") or any(words in text for words in OUT_OF_MEMORY):
        return "memory"
    if any(words in text for words in LOST_WORKER):
        return "worker"
    is_of_a_device = any(words in text for words in OF_A_DEVICE) and "device-side assert" not in text
    return "" if is_of_a_device else "script"


def is_meant(end: RankExit) -> bool:
    """Whether a person or a decision of holter stopped it before it was done."""
    said = end.exited.farewell
    return (
        signal_of(end) == signal.SIGINT
        or end.exited.exit_code in MEANT_CODES
        or bool(said and said.kind == "interrupt")
    )


def has_left(end: RankExit) -> bool:
    """Whether it had left its process group and was then ended with a code from outside of Python.

    Some launchers end their workers in this way.
    """
    said = end.exited.farewell
    return bool(said and said.text == LEFT) and signal_of(end) is None


def has_finished(end: RankExit) -> bool:
    """Whether the script came to its end without an error, even if the process crashed while Python shut down."""
    said = end.exited.farewell
    return end.exited.exit_code == 0 or bool(said and said.kind == "end" and said.text in SCRIPT_DONE)


def signal_of(end: RankExit) -> int | None:
    """Return the signal that ended it, or None."""
    if end.exited.signal:
        return end.exited.signal
    code = end.exited.exit_code
    return -code if code is not None and code < 0 else None


def signal_name(number: int) -> str:
    """Return a signal's name, such as `SIGKILL`."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def is_same_exception(one: RankExit, other: RankExit) -> bool:
    """Whether both have the same text, or the same type from the same line: messages often contain the rank's own number."""
    a, b = one.exited.farewell, other.exited.farewell
    if not a or not b or kind_of(one) != kind_of(other) or own_error(one) != own_error(other):
        return False
    if "exception" not in (a.kind, b.kind):
        return bool(own_error(one)) and one.exited.exit_code == other.exited.exit_code
    is_same_place = (bool(a.where) and a.where == b.where) or (bool(a.own) and a.own[:1] == b.own[:1])
    return a.text == b.text or (is_same_place and a.text.partition(":")[0] == b.text.partition(":")[0])


def how(end: RankExit, *, short: bool = False) -> str:
    """Describe an end: `ended by SIGKILL`, `ended with ValueError: ...`, `ended with exit code 3`.

    `short` leaves out where it happened.
    """
    number, code, said = signal_of(end), end.exited.exit_code, end.exited.farewell
    if number is not None and kind_of(end) in {"signal", "terminated"}:
        memory = " (out of memory, says the kernel)" if end.exited.out_of_memory else ""
        moment = " while Python shut down after the end of its script" if has_finished(end) else ""
        return f"ended by {signal_name(number)}{memory}{moment}"
    if said and said.kind == "exception":
        return f"ended with {_first_line(said.text)}"
    called = (
        f", {said.text.partition('(')[0]} called at {said.where}"
        if said and said.text and said.where and not short
        else ""
    )
    if code is not None:
        return f"ended with exit code {code}{called}"
    return f"ended by {said.text}{called}" if said and said.kind == "exit" else "ended without last words"


def _first_line(text: str) -> str:
    """Return the first line; for a `KeyError:` without a message, its name."""
    return text.strip().splitlines()[0].rstrip(": ") if text.strip() else "an exception"


def own_line(end: RankExit) -> str:
    """Return the script's own line with its code, or else where it was raised; empty if unknown."""
    said = end.exited.farewell
    return (said.own[0] if said.own else said.where) if said else ""


def script_lines(end: RankExit, ranks: Sequence[int]) -> Evidence:
    """Return where in the script it happened, which is what somebody has to look at."""
    said = end.exited.farewell
    assert said is not None
    raised = f"; raised in {said.where}" if said.own and not said.own[0].startswith(said.where) else ""
    via = "".join(f", called from {frame.partition(': ')[0]}" for frame in said.own[1:3])
    file, line = file_and_line(own_line(end))
    return Evidence(
        kind="script_line",
        summary=f"{own_line(end)}{via}{raised}",
        values={"file": file, "line": line, "frames": said.own, "raised": said.where, "ranks": list(ranks)},
    )


def file_and_line(place: str) -> tuple[str, int | None]:
    """Split `/home/me/train.py:41 in main: …` into file and line."""
    found = PLACE.match(place)
    return (found["file"], int(found["line"])) if found else ("", None)


def death(ends: Sequence[RankExit]) -> Evidence:
    """Return how processes ended that ended alike."""
    end, ranks = ends[0], sorted(end.rank for end in ends)
    exited, said = end.exited, end.exited.farewell
    number = signal_of(end)
    where = f", raised at {said.where}" if said and said.where and said.kind == "exception" else ""
    who = f"rank {end.rank} (pid {exited.pid})" if len(ends) == 1 else ranks_text(ranks)
    return Evidence(
        kind="process_exit",
        summary=f"{who} {how(end)}{where}; last seen in {_steps(ends)}, {exited.last_phase.name.lower()}",
        values={
            "rank": end.rank,
            "ranks": ranks,
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


def _steps(ends: Sequence[RankExit]) -> str:
    known = sorted({end.exited.last_step for end in ends})
    return f"step {known[0]}" if len(known) == 1 else f"steps {known[0]} to {known[-1]}"


def victims_of(first: RankExit, victims: Sequence[RankExit]) -> Iterator[Evidence]:
    """Yield the ranks that ended because of it, some of which may have been seen to end earlier."""
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
    """Yield a rank's last statistics, device, collectives and stack, each from the newest look that has it."""
    yield from device_notes.evidence_of(window, rank)
    seen = window.processes.exams.get(rank, ())
    if (one := _newest(seen, "statistics")) is not None:
        yield _statistics(rank, one)
    flights = [one.exam.flight for one in seen if one.exam.flight is not None]
    if flights:
        yield _calls(rank, max(flights, key=lambda flight: flight.taken_ns), seen)
    if (one := _newest(seen, "stacks")) is not None and (stack := stacks.evidence({rank: one})) is not None:
        yield stack


def _calls(rank: int, flight: Flight, seen: Sequence[Examined]) -> Evidence:
    """Return its last calls, with the age of the copy if it is from before a killed rank's end."""
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
