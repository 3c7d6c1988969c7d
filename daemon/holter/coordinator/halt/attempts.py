"""One try to halt a run, as the coordinator has it: what was wished and planned, how far it has come, what became of it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holter import patience
from holter.halting import protocol
from holter.halting.plan import HaltPlan, JobShape, Whereabouts, Wish
from holter.halting.protocol import Course, Seal, Tell
from holter.records import Order


@dataclass(frozen=True)
class Open:
    """Make a directory for a checkpoint of so many completed steps; `opened` is told."""

    step: int


Act = Open | Tell | Seal


@dataclass(frozen=True)
class View:
    """What the coordinator sees; each is worked out only when it is asked for."""

    whereabouts: Callable[[], Sequence[Whereabouts]]
    wish: Callable[[], Wish | None]
    """Of the diagnoses."""
    suspicion: Callable[[], Wish | None]
    """Of a diagnosis that is not sure enough to halt a run that trains, but explains why ranks stand."""
    job: Callable[[], JobShape]


@dataclass(frozen=True)
class Outcome:
    """What became of a halt."""

    name: str
    """completed, incomplete or failed; the run goes on: called_off, or refused to whoever asked."""
    text: str
    checkpoint: str | None = None
    """Relative to the run directory."""
    is_halted: bool = True
    """The ranks were told to leave."""
    reason: str = ""
    """Of the wish."""


@dataclass
class Attempt:
    """One try to halt."""

    wish: Wish
    plan: HaltPlan
    halt: protocol.HaltState | None = None
    """None until the directory is there."""
    course_ns: int = 0
    """When its present course began."""
    told_ns: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    """Rank -> why it did not save."""

    @property
    def course(self) -> str:
        """For people."""
        return self.halt.course.value if self.halt is not None else "preparing"


def order_of(attempt: Attempt, number: int, directory: Path, deadline_s: float, base_step: int) -> Order:
    """With which it begins."""
    plan = attempt.plan
    return Order(
        halt=number,
        kind=plan.kind,
        step=plan.step,
        base_step=base_step,
        snapshot=plan.snapshot,
        directory=str(directory),
        savers=plan.savers,
        lost=plan.lost,
        deadline_s=deadline_s + plan.wait_s,
        reason=attempt.wish.reason[:500],
        is_requested=attempt.wish.is_operator,
    )


def patience_ns(halt: protocol.HaltState) -> float:
    """So long it may stay in its present course."""
    if halt.course is Course.PREPARING:
        return halt.order.deadline_s * 1e9
    keeping = halt.course in (Course.COMMITTED, Course.RESCUING)
    return (halt.order.deadline_s + patience.ANSWER_S) * 1e9 if keeping else float("inf")


def is_known_to_all(halt: protocol.HaltState) -> bool:
    """Everybody who can has said that it goes on."""
    heard = halt.heard
    return all(heard.get(rank) in ("released", "unwilling") for rank in halt.ranks - halt.gone)


def why_off(attempt: Attempt) -> str:
    """For people."""
    assert attempt.halt is not None
    states = {state for _, state in attempt.halt.answers}
    if "unwilling" in states:
        return "the order came too late for the step"
    if "released" in states:
        return "the ranks went on by themselves"
    return "not every rank could be reached" if attempt.halt.gone else "not every rank came to the step in time"
