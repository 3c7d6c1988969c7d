"""The report of a standstill: the facts about a culprit, the summary, and the evidence.

Rank 1 has not entered all_reduce #812 of default_pg, in which rank 0 has waited for 6.4 s; it loops in spin (train.py:41).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from holter.faults.hangs import stacks
from holter.faults.hangs.culprits import Blame, Due, flights
from holter.faults.hangs.stacks import main_stack
from holter.faults.hangs.standstill import Look, Standstill
from holter.faults.shared import collectives, device_notes
from holter.faults.shared.wording import cap, ranks_text
from holter.flight import Deviation, Wait
from holter.records import Evidence, Frame, Phase, ProcessState, ThreadStack

PHASES = {"data": Phase.DATA, "checkpoint": Phase.CHECKPOINT}
UNRULY = ("stopped", "traced", "frozen", "uninterruptible", "zombie", "gone")
HELD_STATES = {
    "stopped": "its process is stopped by a signal",
    "traced": "its process is held by a debugger",
    "frozen": "its process is frozen by its control group",
}
MAX_CULPRITS = 4
"""Number of culprits whose processes are described."""
MAX_STACKS = 64
"""Number of ranks whose stacks are merged."""
MAX_LISTED = 32
"""Number of victims that are listed; all are counted."""


@dataclass(frozen=True)
class Culprit:
    """One of the ranks that are blamed; each fact is True, False, or None if nobody could look."""

    scene: Standstill
    blamed: Blame
    rank: int

    @property
    def look(self) -> Look | None:
        """The last look at it, or None."""
        return self.scene.looks.get(self.rank)

    @property
    def process(self) -> ProcessState | None:
        """Its process, as the kernel shows it."""
        return self.look.exam.process if self.look else None

    @cached_property
    def stack(self) -> ThreadStack | None:
        """The stack of its main thread, or None."""
        found = main_stack(self.look.stacked) if self.look else None
        return found if found and found.frames else None

    @property
    def has_stack(self) -> bool:
        """Whether its main thread's stack is known."""
        return self.stack is not None

    @property
    def phase(self) -> Phase | None:
        """The phase that its hooks last reported."""
        delay = self.scene.delay(self.rank)
        if delay is not None:
            return delay.overdue.phase
        return self.look.exam.phase if self.look else None

    @property
    def is_suspended(self) -> bool | None:
        """Whether it is stopped by a signal, a debugger or the freezer."""
        return self.look.is_suspended if self.look and self.process else None

    @property
    def is_uninterruptible(self) -> bool | None:
        """Whether it is in a system call that nothing can end."""
        return self.look.is_uninterruptible if self.look and self.process else None

    @property
    def is_process_normal(self) -> bool | None:
        """Whether the kernel shows nothing unusual."""
        return None if self.process is None or self.process.state == "unknown" else self.process.state not in UNRULY

    @property
    def is_cpu_moving(self) -> bool | None:
        """Whether it computes; False if it waits for something."""
        return self.look.is_cpu_moving if self.look else None

    @property
    def is_lock_free(self) -> bool | None:
        """Whether the interpreter answered at any look; on a crowded host it may be late at another."""
        seen = (*self.look.earlier, self.look.seen) if self.look else ()
        answers = [one.exam.is_lock_free for one in seen if one.exam.is_lock_free is not None]
        return any(answers) if answers else None

    @property
    def is_interpreter_locked(self) -> bool | None:
        """Whether the interpreter does not answer although the process is not held."""
        if self.look is None or self.is_suspended:
            return False if self.is_suspended else None
        if self.is_lock_free is not None:
            return not self.is_lock_free
        # Nobody could ask, but native code that runs while the main thread owns the lock shows the same.
        stack = self.stack
        return True if stack and stack.owns_lock and stack.frames[0].is_native and self.is_cpu_moving else None

    @property
    def is_elsewhere(self) -> bool | None:
        """Whether it waits in another collective, or went past the one that the others are in."""
        if self.blamed.analysis is None:
            return None
        deviation, wait = self.blamed.deviation, self.blamed.wait
        is_in_another = wait is not None and self.rank in self.blamed.waiting and self.rank in wait.absent
        return is_in_another or (deviation is not None and self.rank in deviation.ranks)

    @property
    def is_saving(self) -> bool | None:
        """Whether both its hooks and its stack show that it saves."""
        if self.look is None or not self.has_stack:
            return None
        return self.phase is Phase.CHECKPOINT and self.look.activity == "checkpoint"

    def is_in(self, activity: str) -> bool | None:
        """Whether its phase or its stack shows this activity."""
        phase = PHASES.get(activity)
        if phase is not None and self.phase is phase:
            return True
        if self.look is None or not self.has_stack:
            return None if phase is None or self.phase is None else False
        if activity == "script" and self.look.activity == "evaluation":
            return self.look.is_own_code
        return self.look.activity == activity


def stall_summary(scene: Standstill, blamed: Blame, at_ns: int) -> str:
    """Return what the victims wait in, and what the culprit does instead, as of a moment."""
    culprit = Culprit(scene, blamed, blamed.culprits[0])
    text = _standing(scene, blamed, at_ns)
    doing = _held(culprit) or _elsewhere(culprit) or _busy(culprit)
    if doing and (work := stage_work(culprit)):
        doing = f"{doing}, {work}"
    if len(blamed.culprits) > 1 and doing:
        doing = f"of rank {culprit.rank}: {doing}"
    return f"{text}; {doing}." if doing else f"{text}."


def stage_work(culprit: Culprit) -> str:
    """Return the stage of a pipeline and its work, if known: `stage 1, in the forward pass of micro-batch 2`."""
    census = culprit.scene.window.models.census.get(culprit.rank)
    stages = census.stages if census is not None else []
    words = [f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"] if stages else []
    if culprit.stack is not None and culprit.stack.work:
        words.append(f"in the {culprit.stack.work}")
    return ", ".join(words)


def _standing(scene: Standstill, blamed: Blame, at_ns: int) -> str:
    who = cap(ranks_text(blamed.culprits))
    is_one = len(blamed.culprits) == 1
    wait, since = blamed.wait, waited(scene, blamed.victims, at_ns)
    if not blamed.victims:
        where = f" (in {_call(wait)})" if wait else ""
        return f"{who} {'stands' if is_one else 'stand'} still, and nobody goes on{where}"
    if wait is None:
        parted = blamed.deviation
        where = _call(parted) if parted is not None and parted.kind != "extra" else "a collective"
        return f"{ranks_text(blamed.victims).capitalize()} {since} in {where} for {ranks_text(blamed.culprits)}"
    if set(blamed.culprits) & set(wait.entered):
        return f"{who} and {ranks_text(blamed.victims)} wait for each other in {_call(wait)}"
    if wait.is_stopped:
        has = "has" if is_one else "have"
        return f"{who} {has} not come out of {_call(wait)}, which others have completed; {ranks_text(wait.entered)} {since} in later calls"
    entered = set(wait.entered)
    victims = [rank for rank in blamed.victims if rank in entered] or blamed.victims
    since = waited(scene, victims, at_ns)
    return f"{who} {'has' if is_one else 'have'} not entered {_call(wait)}, in which {ranks_text(victims)} {since}"


def waited(scene: Standstill, ranks: Sequence[int], at_ns: int) -> str:
    """Return `has waited for 6.4 s`, for the rank that waited longest, as of a moment."""
    delays = [delay for rank in ranks if (delay := scene.delay(rank)) is not None]
    longest_s = max((delay.waited_s(max(at_ns, delay.at_ns)) for delay in delays), default=0.0)
    is_one = len(ranks) == 1
    if longest_s:
        return f"{'has' if is_one else 'have'} waited for {longest_s:.1f} s"
    return "waits" if is_one else "wait"


def _call(place: Wait | Deviation) -> str:
    name = collectives.group_of(place)
    return f"{place.operation} #{place.sequence} of {f'group {name}' if name.isdecimal() else name}"


def _held(culprit: Culprit) -> str:
    """Return what keeps its process or its interpreter from doing anything; empty if nothing does."""
    scene, rank, process = culprit.scene, culprit.rank, culprit.process
    if culprit.blamed.by == "unreachable":
        return f"nothing is heard from its host {scene.window.processes.hosts.get(rank, '')}".rstrip()
    if rank in scene.ended:
        return f"its process has ended in step {scene.ended[rank].exited.last_step}"
    if process is not None and process.state in HELD_STATES:
        return HELD_STATES[process.state]
    if culprit.is_interpreter_locked:
        return f"native code holds its interpreter lock{_in(_native(culprit) or _place(culprit))}"
    if culprit.is_uninterruptible and process is not None:
        return f"it is in uninterruptible sleep{_in(process.wait_channel or _place(culprit))}"
    return ""


def _elsewhere(culprit: Culprit) -> str:
    deviation = culprit.blamed.deviation
    if deviation is None or not culprit.is_elsewhere:
        return ""
    if deviation.kind == "missing":
        return f"it left out {deviation.expected}"
    if deviation.kind == "extra":
        return f"it called {deviation.seen} once more than the others"
    return f"it called {deviation.seen} where {deviation.expected} was to be called"


def _busy(culprit: Culprit) -> str:
    place = _place(culprit)
    if culprit.is_in("data"):
        return f"it waits for its next batch{_in(place)}"
    if culprit.is_in("checkpoint"):
        return f"it is in a save{_in(place)}"
    if not place:
        return ""
    if culprit.is_in("script") and culprit.is_cpu_moving:
        return f"it loops in {place}"
    return f"it waits in {place}" if culprit.is_cpu_moving is False else f"it is in {place}"


def _in(place: str) -> str:
    return f", in {place}" if place else ""


def _place(culprit: Culprit) -> str:
    """Return what the script called last: `spin (train.py:41)`."""
    found = stacks.evidence({culprit.rank: culprit.look.stacked}) if culprit.look and culprit.has_stack else None
    if found is None:
        return ""
    place = next(iter(found.values["ranks"].values()))
    return f"{place['function']} ({place['file']}:{place['line']})" if place["line"] else str(place["function"])


def _native(culprit: Culprit) -> str:
    """Return the innermost native frame with a name, and the script's line that led there."""
    frames = culprit.stack.frames if culprit.stack else []
    named = next((frame for frame in frames if _is_named(frame)), None)
    if named is None:
        return ""
    place = _place(culprit)
    return f"{named.function}, below {place}" if place else named.function


def _is_named(frame: Frame) -> bool:
    return frame.is_native and bool(frame.function) and not frame.function.startswith(("0x", "?", "_Py", "Py"))


def stall_evidence(scene: Standstill, blamed: Blame, found: Due) -> Iterator[Evidence]:
    """Yield stacks, collectives, the culprits' processes, why their time is up, and who waits."""
    shown = (*blamed.culprits, *blamed.victims)[:MAX_STACKS]
    exams = {rank: scene.looks[rank].stacked for rank in shown if rank in scene.looks}
    if (tree := stacks.evidence(exams)) is not None:
        yield tree
    if blamed.analysis is not None:
        inside = set(blamed.wait.entered) if blamed.wait else set()
        victims = [rank for rank in blamed.victims if rank in inside] or blamed.victims
        ranks = (*blamed.culprits[:MAX_CULPRITS], *victims[:1])
        yield from collectives.evidence(blamed.analysis, ranks, flights(scene, ranks))
    if blamed.deviation is not None:
        yield Evidence(kind="deviation", summary=blamed.deviation.why, values={"kind": blamed.deviation.kind})
    for rank in blamed.culprits[:MAX_CULPRITS]:
        yield from _process(Culprit(scene, blamed, rank))
        yield from device_notes.evidence_of(scene.window, rank)
    yield Evidence(kind="deadline", summary=f"{ranks_text(blamed.culprits[:1])}: {found.why}")
    if blamed.victims:
        yield _victims(scene, blamed, found.ready_ns)


def _process(culprit: Culprit) -> Iterator[Evidence]:
    process, rank = culprit.process, culprit.rank
    host = culprit.scene.window.processes.hosts.get(rank, "")
    if process is None or culprit.look is None:
        why = "its sidecar did not answer" if culprit.look is None else "its process could not be looked at"
        yield Evidence(kind="process_state", summary=f"rank {rank}: {why}", values={"rank": rank, "host": host})
        return
    said = [process.state + (f" for {process.stopped_s:.1f} s" if process.stopped_s else "")]
    if not math.isnan(process.cpu_share):
        said.append(f"{process.cpu_share:.2f} of a core")
    if process.wait_channel:
        said.append(f"sleeps in {process.wait_channel}")
    if culprit.is_lock_free is not None:
        said.append("the interpreter answers" if culprit.is_lock_free else "the interpreter does not answer")
    pressed = [f"{name} {share:.0%}" for name, share in sorted(process.pressure.items()) if share >= 0.1]  # noqa: PLR2004
    if pressed:
        said.append(f"tasks of the host wait for {', '.join(pressed)}")
    if not culprit.has_stack and culprit.look.exam.stack_error:
        said.append(f"no stack: {culprit.look.exam.stack_error}")
    values = {
        "rank": rank,
        "host": host,
        "state": process.state,
        "stopped_s": process.stopped_s,
        "cpu_s": process.cpu_s,
        "cpu_share": None if math.isnan(process.cpu_share) else process.cpu_share,
        "wait_channel": process.wait_channel,
        "pressure": dict(process.pressure),
        "is_lock_free": culprit.is_lock_free,
    }
    yield Evidence(kind="process_state", summary=f"rank {rank}: {', '.join(said)}", values=values)


def _victims(scene: Standstill, blamed: Blame, at_ns: int) -> Evidence:
    victims = blamed.victims
    return Evidence(
        kind="victims",
        summary=f"{ranks_text(victims)} {waited(scene, victims, at_ns)} and {'is' if len(victims) == 1 else 'are'} not to blame",
        values={"count": len(victims), "ranks": list(victims[:MAX_LISTED])},
    )
