"""A standstill in a sentence: what the victims wait in, and what the culprit does instead."""

from collections.abc import Sequence

from holter.faults.hangs import stacks
from holter.faults.hangs.culprits import Blame
from holter.faults.hangs.stall_facts import Culprit
from holter.faults.hangs.standstill import Standstill
from holter.faults.shared import collectives
from holter.faults.shared.wording import ranks_text
from holter.flight import Deviation, Wait
from holter.records import Frame

STATES = {
    "stopped": "its process is stopped by a signal",
    "traced": "its process is held by a debugger",
    "frozen": "its process is frozen by its control group",
}


def summary(scene: Standstill, blamed: Blame, at_ns: int) -> str:
    """One sentence, as of a moment.

    `Rank 1 has not entered all_reduce #812 of default_pg, in which rank 0 has waited for 6.4 s; it loops in spin (train.py:41).`
    """
    culprit = Culprit(scene, blamed, blamed.culprits[0])
    text = _standing(scene, blamed, at_ns)
    doing = _held(culprit) or _elsewhere(culprit) or _busy(culprit)
    if len(blamed.culprits) > 1 and doing:
        doing = f"of rank {culprit.rank}: {doing}"
    return f"{text}; {doing}." if doing else f"{text}."


def _standing(scene: Standstill, blamed: Blame, at_ns: int) -> str:
    who = ranks_text(blamed.culprits)
    who = who[0].upper() + who[1:]
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
    entered = set(wait.entered)
    victims = [rank for rank in blamed.victims if rank in entered] or blamed.victims
    since = waited(scene, victims, at_ns)
    return f"{who} {'has' if is_one else 'have'} not entered {_call(wait)}, in which {ranks_text(victims)} {since}"


def waited(scene: Standstill, ranks: Sequence[int], at_ns: int) -> str:
    """`has waited for 6.4 s`: the longest of these ranks, as of a moment."""
    delays = [delay for rank in ranks if (delay := scene.delay(rank)) is not None]
    longest_s = max((delay.waited_s(max(at_ns, delay.at_ns)) for delay in delays), default=0.0)
    is_one = len(ranks) == 1
    if longest_s:
        return f"{'has' if is_one else 'have'} waited for {longest_s:.1f} s"
    return "waits" if is_one else "wait"


def group_of(place: Wait | Deviation) -> str:
    """What people call the group."""
    return collectives.group_name(place.group, place.description)


def _call(place: Wait | Deviation) -> str:
    name = group_of(place)
    return f"{place.operation} #{place.sequence} of {f'group {name}' if name.isdecimal() else name}"


def _held(culprit: Culprit) -> str:
    """What keeps its process, or its interpreter, from doing anything."""
    scene, rank, process = culprit.scene, culprit.rank, culprit.process
    if culprit.blamed.by == "unreachable":
        return f"nothing is heard from its host {scene.window.processes.hosts.get(rank, '')}".rstrip()
    if rank in scene.ended:
        return f"its process has ended in step {scene.ended[rank].exited.last_step}"
    if process is not None and process.state in STATES:
        return STATES[process.state]
    if culprit.is_interpreter_locked:
        return f"native code holds its interpreter lock{_in(_native(culprit) or _place(culprit))}"
    if culprit.is_uninterruptible and process is not None:
        return f"it is in uninterruptible sleep{_in(process.wait_channel or _place(culprit))}"
    return ""


def _elsewhere(culprit: Culprit) -> str:
    deviation = culprit.blamed.deviation
    return _deviated(deviation) if culprit.is_elsewhere and deviation is not None else ""


def _deviated(deviation: Deviation) -> str:
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
    """`spin (train.py:41)`: what the script called last."""
    found = stacks.evidence({culprit.rank: culprit.look.stacked}) if culprit.look and culprit.has_stack else None
    if found is None:
        return ""
    place = next(iter(found.values["ranks"].values()))
    return f"{place['function']} ({place['file']}:{place['line']})" if place["line"] else str(place["function"])


def _native(culprit: Culprit) -> str:
    """The innermost native frame with a name, and the script's line that led there."""
    frames = culprit.stack.frames if culprit.stack else []
    named = next((frame for frame in frames if _is_named(frame)), None)
    if named is None:
        return ""
    place = _place(culprit)
    return f"{named.function}, below {place}" if place else named.function


def _is_named(frame: Frame) -> bool:
    return frame.is_native and bool(frame.function) and not frame.function.startswith(("0x", "?", "_Py", "Py"))
