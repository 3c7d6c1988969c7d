"""Decides whether the rank makes progress, and how long it may stay where it is: heartbeat, process state and time -> Overdue, or nothing new.

    moving ──suspect──▶ suspect ──deadline──▶ overdue        each is reported once per standstill
       ◀───────────────moved──────────────────┘

For a process that is stopped, traced or frozen nothing is learned: it is suspect after a second and overdue after three,
whatever it was doing, and that time does not count for its phase. Neither does time in which this sidecar itself could not
run: on a machine that stood still, the rank stood still too. Nothing is reported before the first heartbeat, nor after the
process has ended.

The deadline of a phase is learned from the waits that ended well (`Deadlines`; the numbers are in `holter.patience`):

    before the first step     half an hour: data sets are prepared, models are loaded, often by one rank while the others wait
    first steps               600 s: compiling, caches, the first contact with every library
    kernels are compiled      as in the first steps: a thread in the rank does that once, on a node that never did, and takes turns with the training
    a phase not seen yet      long: as long as such a phase may take; for a checkpoint, by the bytes it has to write
    afterwards                3 x the longest wait + 1 s, not below a floor, not above a ceiling
    a longer wait was healthy then half as much again, even above the ceiling: what went well once is no alarm the second time

The longest wait is forgotten slowly, so that one odd wait does not hide later standstills for ever. Every wait that ended
in progress is learned, above all one that was wrongly suspected. Time is an argument: seconds of any clock that never goes
back.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from holter import patience
from holter.page import PageHeartbeat
from holter.records import Census, Overdue, Phase, ProcessState, StepDone

SETUP = (Phase.ATTACH, Phase.OTHER)
_PHASES = {phase.name.lower(): phase for phase in Phase}
LATE_S = 1.0
"""Seconds: if the previous look was longer ago than this, the sidecar itself could not run."""
ASLEEP_S = 10.0
"""Seconds: if it was longer ago than this, the whole machine stood still."""
HALTED = frozenset({"stopped", "traced", "frozen"})
ENDED = frozenset({"zombie", "gone"})
Tier = Literal["suspect", "overdue"]
_LEVEL: dict[Tier | None, int] = {None: 0, "suspect": 1, "overdue": 2}


@dataclass(frozen=True)
class Allowance:
    """How long a phase may last now, and why."""

    suspect_s: float
    deadline_s: float
    because: str


class Waits:
    """What is remembered of the waits in one phase: how many there were, and the longest, which is slowly forgotten."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.num_told = 0
        """Number of waits as the rank counted them itself: a look every 50 ms misses the short ones."""
        self.steps: set[int] = set()
        """The first two steps in which there was a wait."""
        self._longest_s, self._at_s = 0.0, 0.0

    @property
    def num(self) -> int:
        """Number of waits that there were at least."""
        return max(self.num_seen, self.num_told)

    def learn(self, wait_s: float, step: int, now_s: float) -> None:
        """Take in a wait that ended in progress."""
        if len(self.steps) < 2:  # noqa: PLR2004 - the first two
            self.steps.add(step)
        wait_s = min(max(wait_s, 0.0), patience.LONGEST_S)
        if wait_s >= self.longest_s(now_s):
            self._longest_s, self._at_s = wait_s, now_s

    def longest_s(self, now_s: float) -> float:
        """Return the longest wait, reduced by its age."""
        half_life_s = max(patience.HALF_LIFE_S, patience.HALF_LIVES * self._longest_s)
        return float(self._longest_s * 0.5 ** (max(0.0, now_s - self._at_s) / half_life_s))


class Deadlines:
    """Learns how long each phase may last, from heartbeats, from the rank's own account of its steps, and from its census."""

    def __init__(self) -> None:
        self._waits = {phase: Waits() for phase in Phase}
        self._first_waits = {phase: Waits() for phase in Phase}
        """Waits of the first steps, for phases with a one-off cost; they count until other waits were seen."""
        self._first_step: int | None = None
        self._num_steps = 0
        self._num_bytes: dict[tuple[int, int], int] = {}
        self._is_ending = False
        self._preparing_since_s: float | None = None

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps completed while we watched."""
        return self._num_steps

    @property
    def has_evaluated(self) -> bool:
        """Whether an evaluation has been seen to its end, which shows when another one follows."""
        return len(self._waits[Phase.EVALUATION].steps) > 1

    def learn_wait(self, phase: Phase, step: int, wait_s: float, now_s: float) -> None:
        """Learn that two heartbeats were this far apart; the older one was in this phase and step."""
        waits = self._of(phase, step)
        waits.num_seen += 1
        waits.learn(wait_s, step, now_s)

    def learn_step(self, step: int, done: StepDone, now_s: float) -> None:
        """Learn which phases a whole step had, from the rank's report, and how long each lasted at least per micro-step."""
        self.reach_step(step + 1)
        num = max(1, done.micro_steps)
        for name, seconds in done.phase_seconds.items():
            phase = _PHASES.get(name)
            if phase is None or phase is Phase.CHECKPOINT:
                continue
            waits = self._of(phase, step)
            waits.num_told += num
            waits.learn(seconds / num, step, now_s)

    def reach_step(self, step: int) -> None:
        """Note that the rank is at this step now."""
        if self._first_step is None:
            self._first_step = step
        self._num_steps = max(self._num_steps, step - self._first_step)

    def learn_census(self, census: Census) -> None:
        """Learn how many bytes a checkpoint has at least."""
        if census.part == 0:
            self._num_bytes = {key: num for key, num in self._num_bytes.items() if key[0] != census.model}
        self._num_bytes[census.model, census.part] = sum(
            math.prod(entry.shape) * _dtype_bytes(entry.dtype) for entry in census.entries if not entry.is_buffer
        )

    def learn_preparing(self, now_s: float, *, is_over: bool) -> None:
        """Note that a thread of ours in the rank begins or ends compiling kernels, which takes turns with the training."""
        self._preparing_since_s = None if is_over else now_s

    def learn_farewell(self) -> None:
        """Note that the rank has sent its farewell."""
        self._is_ending = True

    def allowed(self, phase: Phase, now_s: float) -> Allowance:
        """Return how long the rank may stay in this phase."""
        waits = self._relevant(phase)
        longest_s = waits.longest_s(now_s)
        least_s, text = self._least(phase, waits, longest_s)
        since_s = self._preparing_since_s
        if since_s is not None and now_s - since_s < patience.PREPARING_S and least_s < patience.FIRST_S:
            least_s, text = patience.FIRST_S, "its kernels are being compiled"
        ceiling_s = max(patience.PHASES[phase].ceiling_s, least_s)
        deadline_s = max(
            min(max(least_s, patience.FACTOR * longest_s + patience.EXTRA_S), ceiling_s), patience.BEYOND * longest_s
        )
        suspect_s = deadline_s / 2
        if self._num_steps < patience.FIRST_STEPS and not self._is_ending:
            suspect_s = min(suspect_s, patience.FIRST_LOOK_S)
        return Allowance(
            suspect_s=max(suspect_s, longest_s),
            deadline_s=deadline_s,
            because=f"{text}, so {seconds_text(deadline_s)} are allowed",
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters in the rank's census."""
        return sum(self._num_bytes.values())

    def _least(self, phase: Phase, waits: Waits, longest_s: float) -> tuple[float, str]:
        """Return the seconds that are allowed whatever was learned, and the reason for the allowance."""
        name = phase.name.lower()
        if self._is_ending:
            return patience.ENDING_S, "its interpreter is ending"
        if not self._num_steps and phase in SETUP:
            return patience.SETUP_S, "the first step is not done and its preparation may take long"
        if self._num_steps < patience.FIRST_STEPS:
            least_s = max(patience.FIRST_S, self._unseen_s(phase))
            return least_s, f"the first {patience.FIRST_STEPS} steps may take long and {self._num_steps} are done"
        if self._is_known(phase, waits):
            text = f"the longest of {_count(waits.num)} in {name} was {seconds_text(longest_s)}"
            return patience.PHASES[phase].floor_s, text
        if phase is Phase.CHECKPOINT:
            text = f"no whole checkpoint has been seen yet and the parameters have {self.num_bytes / 1e9:.2g} GB"
        else:
            text = (
                f"only {_count(waits.num)} in {name} were seen so far" if waits.num else f"{name} was never seen before"
            )
        return self._unseen_s(phase), text

    def _of(self, phase: Phase, step: int) -> Waits:
        is_first = patience.PHASES[phase].has_one_off and step - (self._first_step or 0) < patience.FIRST_STEPS
        return self._first_waits[phase] if is_first else self._waits[phase]

    def _relevant(self, phase: Phase) -> Waits:
        waits, first = self._waits[phase], self._first_waits[phase]
        return first if first.num and waits.num < patience.PHASES[phase].num_enough else waits

    def _is_known(self, phase: Phase, waits: Waits) -> bool:
        if phase is Phase.CHECKPOINT and len(waits.steps) < 2:  # noqa: PLR2004 - the first has an end once there is a second
            # A checkpoint is many saves, often the small ones first, so one whole checkpoint must have been seen.
            return False
        return waits.num >= patience.PHASES[phase].num_enough

    def _unseen_s(self, phase: Phase) -> float:
        rule = patience.PHASES[phase]
        if phase is not Phase.CHECKPOINT:
            return rule.unseen_s
        writing_s = patience.CHECKPOINT_COPIES * self.num_bytes / patience.CHECKPOINT_BYTES_PER_S
        return min(writing_s + patience.CHECKPOINT_S, rule.ceiling_s)


def _count(num: int) -> str:
    return f"{num} wait" if num == 1 else f"{num} waits"


def seconds_text(seconds: float) -> str:
    """Format seconds for people: `0.06 s`, `6 s`, `91 s`."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"  # noqa: PLR2004


def _dtype_bytes(dtype: str) -> int:
    """Return the bytes per element, from the name: `bfloat16` has 2, `float8_e4m3fn` has 1, `bool` has 1."""
    found = re.search(r"\d+", dtype)
    return max(1, int(found[0]) // 8) if found else 1


@dataclass(frozen=True)
class _Verdict:
    """The tier that holds now, the seconds after which it began, and why."""

    tier: Tier | None
    deadline_s: float
    because: str
    is_of_process: bool = False
    """Whether it is about the process's state, not the phase."""


class ProgressWatch:
    """Watches one rank, at a look every few milliseconds; remembers what it reported of the present standstill."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._beat: PageHeartbeat | None = None
        self._since_s = 0.0
        self._looked_s: float | None = None
        self._late_s = 0.0
        """Seconds of the present standstill in which the sidecar could not run."""
        self._halted_s = 0.0
        """Seconds of the present standstill in which the process could not run."""
        self._said: Overdue | None = None
        self._moved_on: Overdue | None = None
        """The end of the last standstill that was reported."""
        self._is_of_process = False
        """Whether the last report is about the process, not the phase."""

    @property
    def beat(self) -> PageHeartbeat | None:
        """The last heartbeat seen."""
        return self._beat

    @property
    def is_standing(self) -> bool:
        """Whether a reported standstill is not over yet."""
        return self._tier is not None

    def waited_s(self, now_s: float) -> float:
        """Seconds since the rank last moved on, without time in which the sidecar could not run."""
        return max(0.0, now_s - self._since_s - self._late_s) if self._beat is not None else 0.0

    def look(self, beat: PageHeartbeat | None, process: ProcessState | None, now_s: float) -> Overdue | None:
        """Return what is new; `process` is from its last look, which may be older."""
        since_look_s = now_s - self._looked_s if self._looked_s is not None else 0.0
        self._looked_s = now_s
        state = process.state if process is not None else "unknown"
        if since_look_s > LATE_S:
            # On a crowded machine every look may be late; the sidecar must still notice a standstill.
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
        """Return what holds now, for a receiver that may have missed it.

        That is the present standstill, or that the last one is over.
        """
        if self._said is None:
            return self._moved_on
        return msgspec.structs.replace(self._said, waited_s=self.waited_s(now_s))

    def _move(self, beat: PageHeartbeat, now_s: float) -> Overdue | None:
        """Take in a new heartbeat: learn the wait before it, for the phase of the older heartbeat."""
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
            # It was stopped and no longer is; from now on its phase decides.
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
