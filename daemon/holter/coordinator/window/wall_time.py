"""Divides the wall time into parts (`records.goodput`) as steps, stalls, halts and phases are reported. Pure, bounded.

    T0 ───────────── T1 ──────── T2 ───────── T3 ··········· now       T: when a step was completed, by the clock of one rank
       start, step 0    step 1      step 2       not reported yet

The stretch between two completed steps is divided (`divide`): first what ranks held or hung in it, then what the
slowest rank spent saving, evaluating and waiting for data, then how long the others waited for the latest one; what is
left is progress. The parts always add up to the stretch. Since the last step, the phases in which ranks are seen, once
a second, stand for what is not reported yet. So a part may shrink again: a stall is reported when it has lasted for a
while, and how late ranks came some steps later.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from holter.faults.hangs.endings import kind_of
from holter.faults.window import RankExit, StepArrivals
from holter.records import Attached, Exited, Halting, Observation, Overdue, Phase, StepDone, StepsDone
from holter.records.goodput import PARTS, Goodput, Life, goodput
from holter.records.joined import apart, at, full

FIRST_STEPS = 3
"""Number of first steps, which may include compiling."""
MIN_USUAL, MAX_USUAL = 4, 64
"""Number of later steps from which the usual duration of a step is taken."""
LOOK_NS = 10**9
LATE_NS = 10 * 10**9
"""Nanoseconds after which a step is divided without the ranks that have not reported it."""
EARLIEST_NS = 600 * 10**9
"""Largest time in nanoseconds that a rank can have started before its coordinator; more means that it has another
clock."""
MAX_OPEN = 256
"""Largest number of steps that only some ranks have reported."""
MAX_KEPT = 1024
"""Largest number of divided steps whose stragglers may still be reported; more than are remembered of arrivals."""
MAX_LIVES = 512
"""Largest number of lives that are recorded; if there are more, the oldest are joined."""
WAITED_FOR = ("data", "checkpoint", "evaluation")
STANDING = ("held", "dying", "terminated", "saving", "saved", "failed")


@dataclass
class StepTally:
    """One step, as the ranks reported it."""

    first_told_ns: int
    num_told: int = 0
    active_s: float = 0.0
    """Shortest time that a rank took, without what precedes a first step."""
    seconds: float = 0.0
    """Seconds of all ranks together."""
    longest_s: dict[str, float] = field(default_factory=dict)
    """Longest time of any rank in `data`, `checkpoint` and `evaluation`."""
    ended_ns: int | None = None
    """When it ended, by the rank whose clock is used; None if that rank has not reported it."""

    def add(self, done: StepDone) -> None:
        """Add the report of one more rank."""
        # Between being attached and its first batch the script prepares: that is not part of a step.
        setup_s = sum(done.phase_seconds.get(name, 0.0) for name in ("attach", "other"))
        active_s = max(0.0, done.seconds - setup_s)
        self.active_s = active_s if not self.num_told else min(self.active_s, active_s)
        self.num_told += 1
        self.seconds += done.seconds
        for name in WAITED_FOR:
            self.longest_s[name] = max(self.longest_s.get(name, 0.0), done.phase_seconds.get(name, 0.0))

    def add_joined(self, joined: StepsDone) -> None:
        """Several more; the same as one by one, without taking the record apart."""
        num = len(joined.ranks)
        seconds = full(joined.seconds, num)
        attach, other = (full(joined.phase_seconds.get(name, [0.0]), num) for name in ("attach", "other"))
        active_s = min(max(0.0, took - (a + b)) for took, a, b in zip(seconds, attach, other, strict=True))
        self.active_s = active_s if not self.num_told else min(self.active_s, active_s)
        self.num_told += num
        self.seconds += sum(seconds)
        for name in WAITED_FOR:
            self.longest_s[name] = max(self.longest_s.get(name, 0.0), *joined.phase_seconds.get(name, (0.0,)))


@dataclass
class Span:
    """When something began first and was over last; precise enough within one step."""

    since_ns: int | None = None
    until_ns: int | None = None
    on: set[int] = field(default_factory=set)
    """Ranks on which it lasts."""

    def begin(self, rank: int, at_ns: int) -> None:
        """Note that it lasts on this rank, since `at_ns`."""
        self.on.add(rank)
        self.since_ns = at_ns if self.since_ns is None else min(self.since_ns, at_ns)

    def end(self, rank: int, at_ns: int) -> None:
        """Note that it is over on this rank."""
        if rank in self.on:
            self.on.discard(rank)
            self.until_ns = max(at_ns, self.until_ns or 0)

    def between(self, since_ns: int, until_ns: int) -> tuple[int, int]:
        """Return its part of this stretch; (0, 0) if there is none."""
        if self.since_ns is None:
            return 0, 0
        first, last = max(self.since_ns, since_ns), until_ns if self.on else min(self.until_ns or 0, until_ns)
        return (first, last) if last > first else (0, 0)

    def forget(self, before_ns: int) -> None:
        """Forget its part before this time."""
        if self.since_ns is not None:
            self.since_ns = max(self.since_ns, before_ns) if self.on else None


def divide(took_s: float, lost: Mapping[str, float], rest: str) -> dict[str, float]:
    """Divide a stretch into parts, in order, as far as there is room; `rest` gets what is left.

    >>> divide(10.0, {"held": 0.0, "data": 4.0, "checkpoint": 20.0}, "progress")
    {'data': 4.0, 'checkpoint': 6.0, 'progress': 0.0}
    """
    parts: dict[str, float] = {}
    left_s = max(0.0, took_s)
    for name, seconds in lost.items():
        # NaN is neither more nor less than nothing.
        taken_s = min(seconds, left_s) if seconds > 0 else 0.0
        if taken_s > 0:
            parts[name] = parts.get(name, 0.0) + taken_s
            left_s -= taken_s
    parts[rest] = parts.get(rest, 0.0) + left_s
    return parts


@dataclass
class _LifeTally:
    """One life, as far as it was divided."""

    started_ns: int
    at_ns: int
    """When its last divided step was completed."""
    parts: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    first_rests: list[float] = field(default_factory=list)
    """What was left of each of the first steps, in seconds."""
    usual: list[float] = field(default_factory=list)
    """What was left of later steps, in seconds."""
    evaluated: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_USUAL))
    """Time without gradients in each of the last steps, in seconds."""
    seen: dict[str, float] = field(default_factory=dict)
    """What ranks were seen doing since the last step, in seconds."""
    pids: dict[int, int] = field(default_factory=dict)
    over_ns: int | None = None
    """When its last rank ended; None if it has not."""
    is_started: bool = False
    """Whether a step of it was completed."""

    def add(self, parts: Mapping[str, float]) -> None:
        for name, seconds in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + seconds

    def beyond_every_step_s(self, evaluation_s: float) -> float:
        """What most steps do is a part of the step: a policy that generates what it is trained on evaluates nothing."""
        usual_s = median(self.evaluated) if len(self.evaluated) >= MIN_USUAL else 0.0
        self.evaluated.append(evaluation_s)
        return max(0.0, evaluation_s - usual_s)

    def compiling_s(self) -> float:
        """Return what the first steps took beyond the usual; all of the first one until the usual is known."""
        if len(self.usual) < MIN_USUAL:
            return sum(self.first_rests[:1])
        usual_s = median(self.usual)
        return sum(max(0.0, rest_s - usual_s) for rest_s in self.first_rests)


@dataclass(frozen=True)
class RanksSeen:
    """What the ranks do now."""

    phases: Collection[Phase]
    """Phases that at least one living rank is in."""
    num_expected: int
    """Number of ranks of the job that have not ended, including those that have not come yet."""
    is_complete: bool
    """Whether every rank of the job has come."""
    has_ended: bool
    """Whether every rank of the job has ended."""


class WallTime:
    """The wall time of a run: `hear`, `look`, and ask for `goodput`."""

    def __init__(self, started_ns: int, base_step: Callable[[], int] = lambda: 0) -> None:
        self._base_step = base_step
        self._earlier: list[Life] = []
        self._life = _LifeTally(started_ns, started_ns)
        self._looked_ns = started_ns
        self._open: dict[int, StepTally] = {}
        self._next = 0
        """The first step that is not divided yet."""
        self._ahead_ns = 0
        """Least lead of the clock that is used over the coordinator's: what it reported had not happened yet."""
        self._anchor: int | None = None
        """The rank whose clock is used: the lowest, which usually shares the coordinator's host."""
        self._num_expected = 0
        self._held, self._hung, self._starved = Span(), Span(), Span()
        self._kept: dict[int, tuple[float, str]] = {}
        """For each step whose stragglers are not reported yet: what was left of it, and in which part that is."""
        self._order: deque[int] = deque()
        self._met = -1
        """The newest step whose stragglers were reported."""

    def recall(self, lives: Sequence[Life], *, is_same: bool = False, is_over: bool = False) -> None:
        """Take over earlier lives.

        `is_same`: the last of them is this one, watched by a coordinator that is gone. `is_over`: it has ended, too.
        """
        self._earlier = list(lives)
        if is_same and lives:
            last = self._earlier.pop()
            parts = {name: seconds for name, seconds in last.parts.items() if name in PARTS}
            self._life = _LifeTally(last.started_ns, last.until_ns, parts, last.steps, is_started=last.steps > 0)
            # The usual duration is not recorded: what counted as compiling stays so.
            self._life.first_rests = [0.0] * FIRST_STEPS if last.steps else []
            self._next = last.steps
            self._life.over_ns = last.until_ns if is_over else None

    def hear(self, observation: Observation, received_ns: int) -> None:
        """Take in what a rank reported."""
        rank = observation.rank
        match observation.body:
            case StepDone() as done:
                self._hear_step(rank, observation.step, observation.at_ns, done, received_ns)
            case Attached(pid=pid):
                known = self._life.pids.setdefault(rank, pid)
                if known != pid:
                    self._begin(received_ns)
                    self._life.pids[rank] = pid
                self._begin_earlier(observation.at_ns)
            case Overdue() as overdue:
                self._hear_overdue(rank, overdue, received_ns)
            case Halting(state=state):
                self._held.begin(rank, received_ns) if state in STANDING else self._held.end(rank, received_ns)
            case Exited() as ended:
                for span in (self._held, self._starved):
                    span.end(rank, received_ns)
                is_ordinary = kind_of(RankExit(rank, received_ns, ended)) == "ordinary"
                self._hung.end(rank, received_ns) if is_ordinary else self._hung.begin(rank, received_ns)

    def look(
        self,
        now_ns: int,
        ranks: Callable[[], RanksSeen],
        arrivals: Callable[[], Sequence[StepArrivals]] = tuple,
        *,
        is_final: bool = False,
    ) -> None:
        """Take note, once a second, of what is in progress, and divide steps that will get no more reports."""
        if now_ns - self._looked_ns < LOOK_NS and not is_final:
            return
        seen, life = ranks(), self._life
        self._num_expected = seen.num_expected
        if life.over_ns is None:
            name, since_ns = self._doing(seen), max(self._looked_ns, life.at_ns)
            life.seen[name] = life.seen.get(name, 0.0) + max(0, now_ns - since_ns) / 1e9
            if seen.has_ended:
                self._close_all(now_ns)
                life.over_ns = now_ns
        self._looked_ns = now_ns
        self._close_ready(now_ns)
        self._meet(arrivals())

    def goodput(self, now_ns: int) -> Goodput:
        """Return the goodput of all lives until now."""
        return goodput([*self._earlier, self.life(now_ns)])

    def life(self, now_ns: int) -> Life:
        """Return this life until now."""
        life = self._life
        until_ns = max(life.at_ns, now_ns if life.over_ns is None else life.over_ns)
        parts = dict(life.parts)
        for name, seconds in self._pending(until_ns).items():
            parts[name] = parts.get(name, 0.0) + seconds
        for name in ("progress", "redone"):
            # The first steps are progress, or redone; what they took beyond the usual was for compiling.
            moved_s = min(life.compiling_s() - parts.get("compile", 0.0), parts.get(name, 0.0))
            if moved_s > 0:
                parts[name] -= moved_s
                parts["compile"] = parts.get("compile", 0.0) + moved_s
        told = {name: round(parts[name], 6) for name in PARTS if parts.get(name, 0.0) > 0}
        return Life(
            started_ns=life.started_ns, until_ns=until_ns, base_step=self._base_step(), steps=life.steps, parts=told
        )

    def hear_joined(self, step: int, joined: StepsDone, received_ns: int) -> None:
        """The same of one step of several ranks."""
        if not all(0.0 <= seconds for seconds in joined.seconds):
            for rank, at_ns, done in apart(joined):
                self._hear_step(rank, step, at_ns, done, received_ns)
            return
        if (tally := self._tally(step, received_ns)) is None:
            return
        tally.add_joined(joined)
        index = min(range(len(joined.ranks)), key=joined.ranks.__getitem__)
        self._end_step(joined.ranks[index], step, at(joined.at_ns, index), tally, received_ns)

    def _hear_step(self, rank: int, step: int, at_ns: int, done: StepDone, received_ns: int) -> None:
        if not 0.0 <= done.seconds or (tally := self._tally(step, received_ns)) is None:
            return
        tally.add(done)
        self._end_step(rank, step, at_ns, tally, received_ns)

    def _tally(self, step: int, received_ns: int) -> StepTally | None:
        if step < self._next or step - self._next > MAX_OPEN:
            return None
        return self._open.setdefault(step, StepTally(received_ns))

    def _end_step(self, rank: int, step: int, at_ns: int, tally: StepTally, received_ns: int) -> None:
        """This rank, of those that told it together the lowest, ended it then."""
        if self._anchor is None or rank < self._anchor:
            self._anchor, self._ahead_ns = rank, 0
        if rank == self._anchor:
            self._ahead_ns = max(self._ahead_ns, at_ns - received_ns)
            tally.ended_ns = at_ns
        if self._num_expected and tally.num_told >= self._num_expected:
            self._close_until(step, received_ns)

    def _hear_overdue(self, rank: int, overdue: Overdue, received_ns: int) -> None:
        # A loader that yields nothing is a lack of data, and ranks that wait meanwhile wait for that.
        span = self._starved if overdue.phase is Phase.DATA else self._hung
        if overdue.tier == "overdue":
            span.begin(rank, received_ns - int(overdue.waited_s * 1e9))
        elif overdue.tier == "moved":
            for each in (self._starved, self._hung):
                each.end(rank, received_ns)

    def _close_ready(self, now_ns: int) -> None:
        """Divide steps that wait in vain for ranks that are silent or have ended."""
        late = [
            step
            for step, tally in self._open.items()
            if now_ns - tally.first_told_ns > LATE_NS or (self._num_expected and tally.num_told >= self._num_expected)
        ]
        if late:
            self._close_until(max(late), now_ns)

    def _close_all(self, now_ns: int) -> None:
        if self._open:
            self._close_until(max(self._open), now_ns)

    def _close_until(self, step: int, now_ns: int) -> None:
        for each in sorted(known for known in self._open if known <= step):
            self._close(each, self._open.pop(each), now_ns)
        self._next = step + 1

    def _close(self, step: int, tally: StepTally, now_ns: int) -> None:
        life = self._life
        until_ns = self._ended_ns(tally, now_ns)
        took_s = (until_ns - life.at_ns) / 1e9
        lost = {"start": 0.0} if life.is_started else {"start": took_s - tally.active_s}
        lost |= self._stalls(life.at_ns, until_ns)
        # A stall in evaluation or a save is in both: it is counted once, as far as there is room.
        for name in ("checkpoint", "evaluation", "data"):
            lost[name] = max(lost.get(name, 0.0), tally.longest_s.get(name, 0.0))
        lost["evaluation"] = life.beyond_every_step_s(lost["evaluation"])
        rest = "redone" if self._base_step() + step < self._furthest() else "progress"
        parts = divide(took_s, lost, rest)
        life.add(parts)
        if len(life.first_rests) < FIRST_STEPS:
            life.first_rests.append(parts[rest])
        elif len(life.usual) < MAX_USUAL:
            life.usual.append(parts[rest])
        life.at_ns, life.steps, life.is_started = until_ns, max(life.steps, step + 1), True
        life.seen = {}
        for span in (self._held, self._hung, self._starved):
            span.forget(until_ns)
        self._keep(step, parts[rest], rest)

    def _ended_ns(self, tally: StepTally, now_ns: int) -> int:
        """Return when a step was completed, by the coordinator's clock: never before the previous step, nor later than now."""
        at_ns = self._life.at_ns
        if tally.ended_ns is not None:
            found_ns = tally.ended_ns - self._ahead_ns
        else:
            found_ns = at_ns + int(tally.seconds / max(1, tally.num_told) * 1e9)
        return min(max(at_ns, found_ns), max(at_ns, now_ns))

    def _stalls(self, since_ns: int, until_ns: int) -> dict[str, float]:
        """Return what of a stretch was held, starved or hung; each second is counted once, in this order."""
        held, starved = self._held.between(since_ns, until_ns), self._starved.between(since_ns, until_ns)
        hung = self._hung.between(since_ns, until_ns)
        starving_s = _without(starved, [held])
        return {"held": _without(held, ()), "data": starving_s, "hung": _without(hung, [held, starved])}

    def _pending(self, until_ns: int) -> dict[str, float]:
        """Divide the time since the last step."""
        life, since_ns = self._life, self._life.at_ns
        pending_s, stalls = (until_ns - since_ns) / 1e9, self._stalls(since_ns, until_ns)
        seen = dict(life.seen)
        if life.over_ns is not None:
            for name in ("progress", "redone", "data"):
                seen["end"] = seen.get("end", 0.0) + seen.pop(name, 0.0)
        rest = "end" if life.over_ns is not None else "progress" if life.is_started else "start"
        total_s, left_s = sum(seen.values()), max(0.0, pending_s - sum(stalls.values()))
        shares = {name: seconds / total_s * left_s for name, seconds in seen.items()} if total_s > 0 else {}
        found = divide(pending_s, stalls, "")
        found.pop("")
        for name, seconds in shares.items():
            found[name] = found.get(name, 0.0) + seconds
        found[rest] = found.get(rest, 0.0) + max(0.0, pending_s - sum(found.values()))
        return found

    def _doing(self, seen: RanksSeen) -> str:
        """Return the part that a second counts as in which ranks are seen in these phases."""
        if not self._life.is_started and (Phase.ATTACH in seen.phases or not seen.is_complete or not seen.phases):
            return "start"
        for phase, name in (
            (Phase.CHECKPOINT, "checkpoint"),
            (Phase.EVALUATION, "evaluation"),
            (Phase.DATA, "data"),
        ):
            if phase in seen.phases:
                return name
        return "progress" if self._life.is_started else "compile"

    def _furthest(self) -> int:
        return max((life.base_step + life.steps for life in self._earlier), default=0)

    def _keep(self, step: int, rest_s: float, rest: str) -> None:
        self._kept[step] = (rest_s, rest)
        self._order.append(step)
        while len(self._order) > MAX_KEPT:
            self._kept.pop(self._order.popleft(), None)

    def _meet(self, arrivals: Sequence[StepArrivals]) -> None:
        """Move the time that others waited for the latest rank from what was left of each step to `stragglers`, once."""
        for one in reversed(arrivals):
            if one.step <= self._met:
                break
            if one.step in self._kept:
                rest_s, rest = self._kept.pop(one.step)
                late_s = min(rest_s, _waited_s(one))
                self._life.add({"stragglers": late_s, rest: -late_s})
        self._met = max(self._met, arrivals[-1].step) if arrivals else self._met

    def _begin_earlier(self, at_ns: int) -> None:
        """Move the start of the life to when a rank started, because a coordinator comes up while its ranks start."""
        life = self._life
        if not life.is_started:
            floor_ns = max((one.until_ns for one in self._earlier), default=life.started_ns - EARLIEST_NS)
            life.started_ns = life.at_ns = min(life.started_ns, max(at_ns, floor_ns))

    def _begin(self, now_ns: int) -> None:
        """Begin another life, because ranks came anew under the same coordinator."""
        self._close_all(now_ns)
        ended = self.life(now_ns)
        self._earlier = _joined([*self._earlier, ended])
        self._life = _LifeTally(now_ns, now_ns)
        self._open, self._kept, self._next, self._met = {}, {}, 0, -1
        self._order.clear()
        self._anchor, self._ahead_ns = None, 0
        self._held, self._hung, self._starved = Span(), Span(), Span()


def _without(span: tuple[int, int], others: Iterable[tuple[int, int]]) -> float:
    """Return the seconds of a span that are in none of the others."""
    pieces = [span]
    for first, last in others:
        if last > first:
            cut = [part for begin, end in pieces for part in ((begin, min(end, first)), (max(begin, last), end))]
            pieces = [(begin, end) for begin, end in cut if end > begin]
    return sum(end - begin for begin, end in pieces) / 1e9


def _waited_s(arrivals: StepArrivals) -> float:
    """Return how long the others waited for the latest rank, without its longer wait for data, which has its own part."""
    latest = arrivals.latest[:1]
    return max(0.0, latest[0].lag_s - max(0.0, latest[0].data_s - latest[0].others_data_s)) if latest else 0.0


def _joined(lives: list[Life]) -> list[Life]:
    """Join the oldest two lives, with the pause between them, until there are few enough."""
    while len(lives) > MAX_LIVES:
        first, second, *rest = lives
        whole = goodput([first, second])
        both = Life(
            started_ns=first.started_ns,
            until_ns=second.until_ns,
            base_step=first.base_step,
            steps=max(first.base_step + first.steps, second.base_step + second.steps) - first.base_step,
            parts={name: seconds for name, seconds in whole.parts.items() if seconds > 0},
        )
        lives = [both, *rest]
    return lives
