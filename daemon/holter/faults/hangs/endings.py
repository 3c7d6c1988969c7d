"""How a rank's process ended: what was meant, what a peer's death brought about, and what is a death of its own."""

import signal
from typing import Literal

from holter.faults.window import RankExit

Kind = Literal["ordinary", "terminated", "connection_lost", "timed_out", "signal", "exception", "exit_code", "unknown"]
VICTIMS: tuple[Kind, ...] = ("terminated", "connection_lost", "timed_out")
"""Ends that a peer's death, or its absence, brings about."""

MEANT_CODES = (93, 128 + signal.SIGINT)
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


def kind_of(end: RankExit) -> Kind:
    """How the process ended."""
    said, code, number = end.exited.farewell, end.exited.exit_code, signal_of(end)
    if code == 0 or is_meant(end):
        return "ordinary"
    is_terminated = number == signal.SIGTERM or code == 128 + signal.SIGTERM
    if (
        said and said.kind == "exception" and (is_terminated or number is None)
    ):  # SIGTERM came while it was on its way out
        return _kind_of_exception(said.text.lower())
    if is_terminated:
        return "terminated"
    if number is not None:
        return "signal"
    if code is not None or (said and said.kind == "exit" and said.text != EXIT_DONE):
        return "exit_code"
    return "ordinary" if said else "unknown"


def _kind_of_exception(text: str) -> Kind:
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
