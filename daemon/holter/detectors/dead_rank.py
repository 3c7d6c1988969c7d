"""Dead rank: a rank's process ended, and not because it was done.

What it detects
    The first rank to end abnormally: by a signal, with an exception, with an exit code other than 0, or without a word. Ranks that
    fell afterwards are told apart: the launcher sends SIGTERM to the survivors, and peers raise errors about a closed connection.

Why it matters
    The survivors' logs are full of connection errors that point at each other. Only the first death has a cause worth finding.

False positives
    An ordinary end, Ctrl-C, and SIGTERM to all ranks at once (a scheduler or a person stopped the job) are no faults. A script that
    ends its ranks by `os._exit` with a code other than 0 is reported.

What to do
    Look at the named rank's own log and at the kernel's log of its host at that moment, and at no other rank. SIGKILL with nobody who
    sent it is most often the kernel's out-of-memory killer; SIGSEGV, SIGBUS and SIGABRT come from native code.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from holter.detectors.window import RankExit, Window
from holter.detectors.wording import ranks_text
from holter.records import Evidence, Finding

Kind = Literal["ordinary", "terminated", "connection_lost", "signal", "exception", "exit_code", "unknown"]
VICTIMS: tuple[Kind, ...] = ("terminated", "connection_lost")
"""Ends that a peer's death brings about."""

MEANT_CODES = (93, 128 + signal.SIGINT)
"""Halted by decision, and Ctrl-C as a shell counts it."""

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
    "nccl watchdog",
    "ncclremoteerror",
)
"""What gloo, NCCL and the store say when a peer is gone, in lower case."""


@dataclass(frozen=True)
class DeadRank:
    """Judges which rank died first."""

    name: ClassVar[str] = "dead_rank"

    settle_s: float = 1.0
    """How long to wait after the first abnormal end, so that the true first one is in."""
    reorder_s: float = 1.0
    """A peer's lost connection may be seen this much earlier than the death that closed it."""
    together_s: float = 0.5
    """SIGTERM to all ranks within this time was sent from outside."""

    def __post_init__(self) -> None:
        for name in ("settle_s", "reorder_s", "together_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"dead_rank.{name} must not be negative, got {getattr(self, name)}")

    def judge(self, window: Window) -> Iterator[Finding]:
        """At most one finding: the first death; all later ones are its victims."""
        abnormal = sorted(
            (end for end in window.exits if kind_of(end) != "ordinary"), key=lambda end: (end.at_ns, end.rank)
        )
        if not abnormal:
            return
        is_everyone_gone = window.attached <= {end.rank for end in window.exits}
        if not is_everyone_gone and window.now_ns - abnormal[0].at_ns < self.settle_s * 1e9:
            return
        if self._is_called_off(window.exits, abnormal[0]):
            return
        if is_everyone_gone and len(abnormal) == len(window.exits) and self._are_stopped_together(abnormal):
            return
        culprits = self._culprits(abnormal)
        is_unclear = (
            is_everyone_gone and self._are_together(abnormal) and all(kind_of(end) == "unknown" for end in abnormal)
        )
        yield _finding(
            culprits, abnormal, is_everyone_gone=is_everyone_gone, is_order_clear=not is_unclear or len(abnormal) == 1
        )

    def _is_called_off(self, ends: tuple[RankExit, ...], first: RankExit) -> bool:
        """Ctrl-C or a decided halt came first: whatever the other ranks then said is no fault."""
        slack_ns = self.reorder_s * 1e9 if kind_of(first) in VICTIMS else 0
        return any(_is_meant(end) and end.at_ns <= first.at_ns + slack_ns for end in ends)

    def _are_together(self, ends: list[RankExit]) -> bool:
        return ends[-1].at_ns - ends[0].at_ns <= self.together_s * 1e9

    def _are_stopped_together(self, ends: list[RankExit]) -> bool:
        return all(kind_of(end) == "terminated" for end in ends) and self._are_together(ends)

    def _culprits(self, ends: list[RankExit]) -> list[RankExit]:
        first = ends[0]
        if kind_of(first) in VICTIMS:
            soon = [end for end in ends if end.at_ns - first.at_ns <= self.reorder_s * 1e9]
            first = next((end for end in soon if kind_of(end) not in VICTIMS), first)
        if kind_of(first) not in {"exception", "connection_lost"}:
            return [first]
        return [first, *(end for end in ends if end.rank != first.rank and _is_same_exception(first, end))]


def kind_of(end: RankExit) -> Kind:
    """How the process ended."""
    said, code, number = end.exited.farewell, end.exited.exit_code, _signal(end)
    if code == 0 or _is_meant(end):
        return "ordinary"
    is_terminated = number == signal.SIGTERM or code == 128 + signal.SIGTERM
    if (
        said and said.kind == "exception" and (is_terminated or number is None)
    ):  # SIGTERM came while it was on its way out
        return "connection_lost" if any(text in said.text.lower() for text in LOST_CONNECTION) else "exception"
    if is_terminated:
        return "terminated"
    if number is not None:
        return "signal"
    if code is not None:
        return "exit_code"
    return "ordinary" if said else "unknown"


def _is_meant(end: RankExit) -> bool:
    """A person or a decision of ours stopped it before it was done."""
    said = end.exited.farewell
    return (
        _signal(end) == signal.SIGINT or end.exited.exit_code in MEANT_CODES or bool(said and said.kind == "interrupt")
    )


def _signal(end: RankExit) -> int | None:
    if end.exited.signal:
        return end.exited.signal
    code = end.exited.exit_code
    return -code if code is not None and code < 0 else None


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _is_same_exception(one: RankExit, other: RankExit) -> bool:
    """The same text, or the same type from the same line: messages often hold the rank's own number."""
    a, b = one.exited.farewell, other.exited.farewell
    if not a or not b or a.kind != "exception" or b.kind != "exception" or kind_of(one) != kind_of(other):
        return False
    is_same_place = bool(a.where) and a.where == b.where
    return a.text == b.text or (is_same_place and a.text.partition(":")[0] == b.text.partition(":")[0])


def _how(end: RankExit) -> str:
    number, code, said = _signal(end), end.exited.exit_code, end.exited.farewell
    if number is not None and kind_of(end) in {"signal", "terminated"}:
        return f"ended by {_signal_name(number)}" + (
            " (out of memory, says the kernel)" if end.exited.out_of_memory else ""
        )
    if said and said.kind == "exception":
        return f"ended with {_first_line(said.text)}"
    if code is not None:
        return f"ended with exit code {code}"
    return "ended without last words"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "an exception"


def _finding(
    culprits: list[RankExit], abnormal: list[RankExit], *, is_everyone_gone: bool, is_order_clear: bool
) -> Finding:
    first = culprits[0]
    kind = kind_of(first)
    ranks = tuple(sorted(end.rank for end in culprits))
    victims = [end for end in abnormal if end.rank not in ranks]
    step, phase = first.exited.last_step, first.exited.last_phase.name.lower()
    number = _signal(first)
    return Finding(
        detector=DeadRank.name,
        severity="critical",
        first_step=step,
        detected_step=step,
        ranks=ranks,
        summary=f"{ranks_text(ranks).capitalize()} {_how(first)} at step {step}, in phase {phase}.",
        facts={
            "is_signal": kind in {"signal", "terminated"},
            "is_killed": number == signal.SIGKILL,
            "is_terminated": kind == "terminated",
            "is_exception": kind in {"exception", "connection_lost"},
            "is_connection_lost": kind == "connection_lost",
            "is_status_known": kind != "unknown",
            "is_order_clear": is_order_clear,
            "has_earlier_death": any(end.at_ns < first.at_ns and kind_of(end) not in VICTIMS for end in victims),
            "is_out_of_memory": first.exited.out_of_memory,
            "is_on_several_ranks": len(ranks) > 1,
            "is_everyone_gone": is_everyone_gone,
        },
        evidence=(*(_evidence(end) for end in culprits), *_victims_evidence(first, victims)),
    )


def _evidence(end: RankExit) -> Evidence:
    exited, said = end.exited, end.exited.farewell
    number = _signal(end)
    where = f", raised at {said.where}" if said and said.where else ""
    return Evidence(
        kind="process_exit",
        summary=f"rank {end.rank} (pid {exited.pid}) {_how(end)}{where}; last seen in step {exited.last_step}, {exited.last_phase.name.lower()}",
        values={
            "rank": end.rank,
            "pid": exited.pid,
            "exit_code": exited.exit_code,
            "signal": _signal_name(number) if number is not None else None,
            "out_of_memory": exited.out_of_memory,
            "farewell": said.text if said else None,
            "where": said.where if said else None,
            "last_step": exited.last_step,
            "last_phase": exited.last_phase.name.lower(),
            "at_ns": end.at_ns,
        },
    )


def _victims_evidence(first: RankExit, victims: list[RankExit]) -> Iterator[Evidence]:
    shown = 4
    for end in victims[:shown]:
        after_s = (end.at_ns - first.at_ns) / 1e9
        order = f"{after_s:.1f} s later" if after_s >= 0 else f"seen {-after_s:.1f} s earlier, but brought about by it"
        yield Evidence(
            kind="process_exit",
            summary=f"rank {end.rank} {_how(end)}, {order}",
            values={"rank": end.rank, "after_s": after_s, "victim": True},
        )
    if len(victims) > shown:
        summary = f"and {len(victims) - shown} more ranks after it"
        yield Evidence(kind="process_exit", summary=summary, values={"num_more": len(victims) - shown})
