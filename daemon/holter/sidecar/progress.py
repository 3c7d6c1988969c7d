"""Whether the rank moves on: where it is, what its process does and what time it is -> Overdue, or nothing new.

    moving ──suspect──▶ suspect ──deadline──▶ overdue        each is said once for one standstill
       ◀───────────────moved──────────────────┘

A process that is stopped, traced or frozen needs no learning: it is suspect after a second and overdue after three, whatever it was
doing; and that time is not held against the phase it was in. Nor is the time in which this sidecar itself was not let
run: on a machine that stood still, the rank did too. Nothing is said before the first beat, nor once the process has ended.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from holter import patience
from holter.page import PageHeartbeat
from holter.records import Overdue, Phase, ProcessState
from holter.sidecar.deadlines import Deadlines, seconds_text

LATE_S = 1.0
"""A look that comes so long after the one before says that we were not let run."""
ASLEEP_S = 10.0
"""One that comes so long after says that the machine stood still."""
HALTED = frozenset({"stopped", "traced", "frozen"})
ENDED = frozenset({"zombie", "gone"})

Tier = Literal["suspect", "overdue"]
_LEVEL: dict[Tier | None, int] = {None: 0, "suspect": 1, "overdue": 2}


@dataclass(frozen=True)
class _Verdict:
    """The tier that holds now, after how many seconds it began, and why."""

    tier: Tier | None
    deadline_s: float
    because: str
    is_of_process: bool = False
    """Of the process's state, not of the phase."""


class ProgressWatch:
    """Looks every few milliseconds; keeps what was said of the present standstill."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._beat: PageHeartbeat | None = None
        self._since_s = 0.0
        self._looked_s: float | None = None
        self._late_s = 0.0
        """Of the present standstill: when we were not let run."""
        self._halted_s = 0.0
        """Of the present standstill: when the process was not let run."""
        self._said: Overdue | None = None
        self._moved_on: Overdue | None = None
        """The last end of a standstill that was said."""
        self._is_of_process = False
        """What was said is."""

    @property
    def beat(self) -> PageHeartbeat | None:
        """Where the rank was last seen."""
        return self._beat

    @property
    def is_standing(self) -> bool:
        """A standstill was said and is not over."""
        return self._tier is not None

    def waited_s(self, now_s: float) -> float:
        """Since the rank last moved on, as far as we were awake."""
        return max(0.0, now_s - self._since_s - self._late_s) if self._beat is not None else 0.0

    def look(self, beat: PageHeartbeat | None, process: ProcessState | None, now_s: float) -> Overdue | None:
        """What is new; `process` as it was last looked at."""
        since_look_s = now_s - self._looked_s if self._looked_s is not None else 0.0
        self._looked_s = now_s
        state = process.state if process is not None else "unknown"
        if since_look_s > LATE_S:
            # On a crowded machine one may be late every time, and is not to be blind for that.
            self._late_s += since_look_s - (LATE_S if since_look_s < ASLEEP_S else 0.0)
        elif state in HALTED:
            self._halted_s += since_look_s
        if beat is None or state in ENDED:
            return None
        if self._beat is None or beat != self._beat:
            return self._move(beat, now_s)
        verdict = self._halted(process) or self._asleep(process)
        in_phase = self._in_phase(beat.phase, now_s)
        if verdict is None or _LEVEL[in_phase.tier] > _LEVEL[verdict.tier]:
            verdict = in_phase
        return self._say(verdict, now_s)

    def again(self, now_s: float) -> Overdue | None:
        """What holds now, for somebody who may have missed it: the present standstill, or that the last one is over."""
        if self._said is None:
            return self._moved_on
        return msgspec.structs.replace(self._said, waited_s=self.waited_s(now_s))

    def _move(self, beat: PageHeartbeat, now_s: float) -> Overdue | None:
        """A new beat: the wait before it is learned, in the phase of the older beat."""
        self._deadlines.reach_step(beat.step)
        moved = None
        if self._beat is not None:
            healthy_s = self.waited_s(now_s) - self._halted_s
            self._deadlines.learn_wait(self._beat.phase, self._beat.step, healthy_s, now_s)
            moved = self._moved(now_s, f"it went on after {seconds_text(self.waited_s(now_s))}")
        self._beat, self._since_s = beat, now_s
        self._late_s = self._halted_s = 0.0
        return moved

    def _say(self, verdict: _Verdict, now_s: float) -> Overdue | None:
        if verdict.tier is None:
            # It was stopped and is no longer: what it does now is a matter of its phase.
            return self._moved(
                now_s, "its process runs again" if self._is_of_process else "more time is allowed by now"
            )
        if _LEVEL[verdict.tier] <= _LEVEL[self._tier]:
            return None
        assert self._beat is not None
        self._is_of_process = verdict.is_of_process
        self._said = Overdue(
            tier=verdict.tier,
            phase=self._beat.phase,
            micro_step=self._beat.micro_step,
            waited_s=self.waited_s(now_s),
            deadline_s=verdict.deadline_s,
            because=verdict.because,
            num_steps=self._deadlines.num_steps,
            has_evaluated=self._deadlines.has_evaluated,
        )
        return self._said

    def _moved(self, now_s: float, because: str) -> Overdue | None:
        said, self._said = self._said, None
        if said is None:
            return None
        self._moved_on = Overdue(
            tier="moved",
            phase=said.phase,
            micro_step=said.micro_step,
            waited_s=self.waited_s(now_s),
            deadline_s=said.deadline_s,
            because=because,
        )
        return self._moved_on

    @property
    def _tier(self) -> Tier | None:
        return self._said.tier if self._said is not None and self._said.tier != "moved" else None

    def _in_phase(self, phase: Phase, now_s: float) -> _Verdict:
        allowed = self._deadlines.allowed(phase, now_s)
        waited_s = self.waited_s(now_s) - self._halted_s
        if waited_s >= allowed.deadline_s:
            return _Verdict("overdue", allowed.deadline_s, allowed.because)
        return _Verdict("suspect" if waited_s >= allowed.suspect_s else None, allowed.suspect_s, allowed.because)

    def _halted(self, process: ProcessState | None) -> _Verdict | None:
        if process is None or process.state not in HALTED or process.stopped_s < patience.HALTED_SUSPECT_S:
            return None
        because = (
            f"its process has been {process.state} for {seconds_text(process.stopped_s)}, and one that works never is"
        )
        if process.stopped_s >= patience.HALTED_OVERDUE_S:
            return _Verdict("overdue", patience.HALTED_OVERDUE_S, because, is_of_process=True)
        return _Verdict("suspect", patience.HALTED_SUSPECT_S, because, is_of_process=True)

    def _asleep(self, process: ProcessState | None) -> _Verdict | None:
        if process is None or process.state != "uninterruptible" or process.stopped_s < patience.ASLEEP_SUSPECT_S:
            return None
        where = f" in {process.wait_channel}" if process.wait_channel else ""
        asleep = f"has been in one uninterruptible sleep{where} for {seconds_text(process.stopped_s)}"
        return _Verdict("suspect", patience.ASLEEP_SUSPECT_S, f"its process {asleep}", is_of_process=True)
