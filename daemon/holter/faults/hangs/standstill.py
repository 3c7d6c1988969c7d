"""A standstill: ranks that do not move on, and what was seen of all ranks since it became known.

    suspect               asked_ns                                                      now
    ---x-------------------|--------------------------------------------------------------|
       last moved          every rank is looked at         ... and again, when it is overdue

Everything here is computed from a window and comes out the same at every judgement: the moment at which the first
examination was asked for is read from its answers.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from holter.faults.hangs.stacks import activity, is_own_code, main_stack, operation
from holter.faults.window import Delay, Examined, RankExit, Window
from holter.patience import FIRST_STEPS
from holter.records import Exam, Flight, Frame, Phase, ThreadStack

SUSPENDED = ("stopped", "traced", "frozen")
"""States in which no process goes on by itself."""
UNINTERRUPTIBLE_S = 3.0
"""Seconds: a shorter uninterruptible sleep is an ordinary read from a disk."""
ORDERED = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""Phases that follow each other in every step."""
BUSY_SHARE = 0.3
"""Share of one core above which a process computes; threads that only wait need less."""
JITTER_NS = 100_000_000
"""Nanoseconds by which the moment at which a rank last moved may differ from one message to the next."""
STALE_NS = 1_000_000_000
"""Nanoseconds: a recorder's copy that is older than the standstill by more than this does not show where the rank is."""


@dataclass(frozen=True)
class Look:
    """The last look at one rank, and those before, in the present standstill."""

    rank: int
    seen: Examined
    earlier: tuple[Examined, ...] = ()
    """Oldest first."""

    @property
    def exam(self) -> Exam:
        """The exam of the last look."""
        return self.seen.exam

    @property
    def before(self) -> Examined | None:
        """The look before the last one, or None."""
        return self.earlier[-1] if self.earlier else None

    @cached_property
    def stacked(self) -> Exam:
        """The exam whose stacks are shown: if the rank has not moved, the newest with native frames, or else with any."""
        if self.has_moved:
            return self.exam
        seen = [one.exam for one in (*self.earlier, self.seen) if one.exam.stacks]
        native = [exam for exam in seen if exam.depth == "native"]
        return (native or seen or [self.exam])[-1]

    @cached_property
    def activity(self) -> str:
        """What its main thread does, by its stack; `unknown` without one."""
        found = _activity(self.exam)
        if found == "unknown" and self.stacked is not self.exam:
            found = _activity(self.stacked)
        # Different operations at different looks mean a loop of the script.
        return "script" if found == "compute" and len(self._operations) > 1 else found

    @property
    def is_own_code(self) -> bool:
        """Whether the script's own lines run or wait, whatever they are for."""
        stack = main_stack(self.stacked)
        return stack is not None and is_own_code(stack.frames)

    @cached_property
    def _operations(self) -> set[tuple[str, ...]]:
        seen = (*self.earlier, self.seen)
        stacks = [stack for one in seen if (stack := main_stack(one.exam)) and activity(stack.frames) == "compute"]
        return {operation(stack.frames) for stack in stacks}

    @property
    def has_native_frames(self) -> bool:
        """Whether some look showed native frames."""
        return any(one.exam.depth == "native" and not one.exam.stack_error for one in (*self.earlier, self.seen))

    @property
    def is_cpu_moving(self) -> bool | None:
        """Whether it computes; False if it waits for something, None if unknown."""
        process = self.exam.process
        if process is None or math.isnan(process.cpu_share):
            return None
        # On a crowded host a loop gets little of a core.
        return process.cpu_share >= BUSY_SHARE or process.state == "running"

    @property
    def is_busy(self) -> bool:
        """Whether it computes, or its main thread is elsewhere than at the look before."""
        if self.is_cpu_moving or self.before is None:
            return bool(self.is_cpu_moving)
        now, before = main_stack(self.exam), main_stack(self.before.exam)
        return now is not None and before is not None and _python(now) != _python(before)

    @property
    def is_suspended(self) -> bool:
        """Whether the kernel says that it cannot go on by itself."""
        return self.exam.process is not None and self.exam.process.state in SUSPENDED

    @property
    def is_uninterruptible(self) -> bool:
        """Whether it is in a system call that nothing can end."""
        process = self.exam.process
        return process is not None and process.state == "uninterruptible" and process.stopped_s >= UNINTERRUPTIBLE_S

    @property
    def suspended_s(self) -> float:
        """Seconds for which it has been suspended, as of this look."""
        return self.exam.process.stopped_s if self.exam.process and self.is_suspended else 0.0

    @cached_property
    def flight(self) -> Flight | None:
        """Its recorder's copy, if that was made while the rank stood where it stands now."""
        flight = self.exam.flight
        if flight is None:
            return None
        age_ns = (self.seen.observed_ns or self.seen.at_ns) - flight.taken_ns
        return flight if age_ns <= self.exam.waited_s * 1e9 + STALE_NS else None

    @property
    def has_moved(self) -> bool:
        """Whether it moved since the look before: another step, phase or micro-step, or a new call."""
        before = self.before
        return before is not None and (_place(before) != _place(self.seen) or _has_called(before.exam, self.exam))


@dataclass(frozen=True)
class Standstill:
    """What is known of a standstill, as of the window's moment."""

    window: Window
    asked_ns: int
    """When it became known: the moment for which every rank was first examined."""
    living: frozenset[int]
    ended: Mapping[int, RankExit]
    looks: Mapping[int, Look]
    """Looks at the ranks that were examined since then."""

    @property
    def now_ns(self) -> int:
        """The moment of judgement."""
        return self.window.real_ns or self.window.now_ns

    @property
    def is_before_first_step(self) -> bool:
        """Whether none of the ranks that stand still has done a step, because the job is being set up."""
        return all(num == 0 for num in self._nums_steps)

    @property
    def is_early(self) -> bool:
        """Whether all of them are in their first steps."""
        return all(num is not None and num < FIRST_STEPS for num in self._nums_steps)

    @property
    def _nums_steps(self) -> Iterator[int | None]:
        return (delay.overdue.num_steps for rank, delay in self.window.processes.delays.items() if rank in self.living)

    @property
    def began_ns(self) -> int:
        """When the first of them last moved."""
        return min(delay.moved_ns for rank, delay in self.window.processes.delays.items() if rank in self.living)

    def looked_ns(self, rank: int) -> int:
        """Return the newest request to look at it that was answered or given up; 0 if there was none."""
        look = self.looks.get(rank)
        return max(look.exam.asked_ns if look else 0, self.window.processes.unexamined.get(rank, 0))

    def delay(self, rank: int) -> Delay | None:
        """Return the delay of a rank that does not move on, as its sidecar reports it; None if it moves."""
        return self.window.processes.delays.get(rank)

    def overdue(self, rank: int) -> Delay | None:
        """Return its delay if its own deadline has passed, else None."""
        delay = self.window.processes.delays.get(rank)
        return delay if delay is not None and delay.overdue.tier == "overdue" else None

    def is_silent(self, rank: int) -> bool:
        """Whether its sidecar is no longer heard, although the connection was not closed."""
        link = self.window.processes.links.get(rank)
        return link is not None and link.state == "silent"

    def step(self, rank: int) -> int:
        """Return the step in which it stands."""
        if rank in self.window.processes.delays:
            return self.window.processes.delays[rank].step
        if rank in self.looks:
            return self.looks[rank].seen.step
        if rank in self.ended:
            return self.ended[rank].exited.last_step
        return min((delay.step for delay in self.window.processes.delays.values()), default=0)

    def place(self, rank: int) -> tuple[int, int, int] | None:
        """Return (step, micro-step, phase), for comparison with other ranks; a phase outside of the order is -1."""
        look, delay = self.looks.get(rank), self.delay(rank)
        if delay is not None:
            return _ordered(delay.step, delay.overdue.micro_step, delay.overdue.phase)
        return _ordered(look.seen.step, look.exam.micro_step, look.exam.phase) if look is not None else None


def standstill(window: Window) -> Standstill | None:
    """Return the present standstill; None if every rank moves."""
    ended = {end.rank: end for end in window.processes.exits}
    living = frozenset(window.attached - ended.keys())
    delays = [delay for rank, delay in window.processes.delays.items() if rank in living]
    if not delays:
        return None
    began_ns = min(delay.moved_ns for delay in delays) - JITTER_NS
    asked_ns = min(_asked(window, began_ns), default=min(delay.at_ns for delay in delays))
    looks = {
        rank: look
        for rank, exams in window.processes.exams.items()
        if rank in window.attached and (look := _look(rank, exams, asked_ns)) is not None
    }
    return Standstill(window, asked_ns, living, ended, looks)


def _asked(window: Window, began_ns: int) -> Iterator[int]:
    """Yield the moments of requests since the first rank stood still, from the answers and from requests that got none."""
    for rank in window.processes.delays:
        for seen in window.processes.exams.get(rank, ()):
            if seen.exam.asked_ns >= began_ns:
                yield seen.exam.asked_ns
        if rank in window.processes.unexamined and window.processes.unexamined[rank] >= began_ns:
            yield window.processes.unexamined[rank]


def _look(rank: int, exams: tuple[Examined, ...], asked_ns: int) -> Look | None:
    answers = [seen for seen in exams if seen.exam.reason == "asked" and seen.exam.asked_ns >= asked_ns]
    if not answers:
        return None
    return Look(rank, answers[-1], tuple(answers[:-1]))


def _activity(exam: Exam) -> str:
    stack = main_stack(exam)
    return activity(stack.frames) if stack else "unknown"


def _python(stack: ThreadStack) -> list[Frame]:
    return [frame for frame in stack.frames if not frame.is_native]


def _place(seen: Examined) -> tuple[int, Phase, int]:
    return seen.step, seen.exam.phase, seen.exam.micro_step


def _has_called(before: Exam, after: Exam) -> bool:
    if before.flight is None or after.flight is None:
        return False
    return _newest(before.flight) != _newest(after.flight)


def _newest(flight: Flight) -> tuple[int, frozenset[tuple[str, int]]]:
    """Return how far it has come: its last call, and the counts of its groups."""
    entered = frozenset((group.name, group.last_entered) for group in flight.groups)
    return max((call.record for call in flight.calls), default=-1), entered


def _ordered(step: int, micro_step: int, phase: Phase) -> tuple[int, int, int]:
    return step, micro_step, ORDERED.index(phase) if phase in ORDERED else -1
