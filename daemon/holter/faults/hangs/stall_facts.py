"""What is known of a culprit: each True, False, or None where nobody could look."""

from dataclasses import dataclass
from functools import cached_property

from holter.faults.hangs.culprits import Blame
from holter.faults.hangs.stacks import main_stack
from holter.faults.hangs.standstill import Look, Standstill
from holter.records import Phase, ProcessState, ThreadStack

PHASES = {"data": Phase.DATA, "checkpoint": Phase.CHECKPOINT}
UNRULY = ("stopped", "traced", "frozen", "uninterruptible", "zombie", "gone")


@dataclass(frozen=True)
class Culprit:
    """One of those who are blamed."""

    scene: Standstill
    blamed: Blame
    rank: int

    @property
    def look(self) -> Look | None:
        """As it was seen last."""
        return self.scene.looks.get(self.rank)

    @property
    def process(self) -> ProcessState | None:
        """Its process, as the kernel shows it."""
        return self.look.exam.process if self.look else None

    @cached_property
    def stack(self) -> ThreadStack | None:
        """Of its main thread."""
        found = main_stack(self.look.stacked) if self.look else None
        return found if found and found.frames else None

    @property
    def has_stack(self) -> bool:
        """Whether its main thread was seen."""
        return self.stack is not None

    @property
    def phase(self) -> Phase | None:
        """What its hooks said last."""
        delay = self.scene.delay(self.rank)
        if delay is not None:
            return delay.overdue.phase
        return self.look.exam.phase if self.look else None

    @property
    def is_suspended(self) -> bool | None:
        """Stopped by a signal, a debugger or the freezer."""
        return self.look.is_suspended if self.look and self.process else None

    @property
    def is_uninterruptible(self) -> bool | None:
        """In a system call that nothing ends."""
        return self.look.is_uninterruptible if self.look and self.process else None

    @property
    def is_process_normal(self) -> bool | None:
        """The kernel shows nothing odd."""
        return None if self.process is None or self.process.state == "unknown" else self.process.state not in UNRULY

    @property
    def is_cpu_moving(self) -> bool | None:
        """It computes; False: it waits for something."""
        return self.look.is_cpu_moving if self.look else None

    @property
    def is_lock_free(self) -> bool | None:
        """The interpreter answered at some look; on a crowded host it may be late at another."""
        seen = (*self.look.earlier, self.look.seen) if self.look else ()
        answers = [one.exam.is_lock_free for one in seen if one.exam.is_lock_free is not None]
        return any(answers) if answers else None

    @property
    def is_interpreter_locked(self) -> bool | None:
        """The interpreter does not answer although the process is not held."""
        if self.look is None or self.is_suspended:
            return False if self.is_suspended else None
        if self.is_lock_free is not None:
            return not self.is_lock_free
        # Nobody could ask: native code that runs while the main thread owns the lock does the same.
        stack = self.stack
        return True if stack and stack.owns_lock and stack.frames[0].is_native and self.is_cpu_moving else None

    @property
    def is_elsewhere(self) -> bool | None:
        """It waits in another collective, or went past the one that the others are in."""
        if self.blamed.analysis is None:
            return None
        deviation, wait = self.blamed.deviation, self.blamed.wait
        is_in_another = wait is not None and self.rank in self.blamed.waiting and self.rank in wait.absent
        return is_in_another or (deviation is not None and self.rank in deviation.ranks)

    @property
    def is_saving(self) -> bool | None:
        """Its hooks and its stack both say that it saves."""
        if self.look is None or not self.has_stack:
            return None
        return self.phase is Phase.CHECKPOINT and self.look.activity == "checkpoint"

    def is_in(self, activity: str) -> bool | None:
        """By its phase or its stack."""
        phase = PHASES.get(activity)
        if phase is not None and self.phase is phase:
            return True
        if self.look is None or not self.has_stack:
            return None if phase is None or self.phase is None else False
        if activity == "script" and self.look.activity == "evaluation":
            return self.look.is_own_code
        return self.look.activity == activity
