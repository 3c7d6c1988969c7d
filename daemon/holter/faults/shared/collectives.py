"""Evidence from the ranks' calls: which rank waits where for whom, and a rank's last calls in lines that are ready to print."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from holter.faults.shared.wording import ranks_text
from holter.flight import Analysis, Deviation, Wait, analyse, is_over, signature
from holter.records import Call, Evidence, Flight

MAX_WAITS = 3
"""Number of waits shown besides the one that everything hangs on."""
MAX_RANKS = 4
"""Number of ranks whose last calls are shown."""
MAX_CALLS = 8
"""Number of calls shown of one rank, the newest."""
MAX_NAME = 28
"""Number of characters of a group's name in a table."""
MIN_AGE_S = 0.05
"""Seconds: calls younger than this are shown as made just now."""


class _Known:
    """Flights compared by identity: at the next judgement they are the same objects, and need not be analysed again."""

    def __init__(self, flights: Mapping[int, Flight]) -> None:
        self.flights = dict(flights)

    def __hash__(self) -> int:
        return hash(tuple((rank, id(flight)) for rank, flight in self.flights.items()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Known)
            and self.flights.keys() == other.flights.keys()
            and all(flight is other.flights[rank] for rank, flight in self.flights.items())
        )


def analysed(flights: Mapping[int, Flight], world_size: int) -> Analysis:
    """Return `analyse` of the flights, cached as long as they are the same."""
    return _analysed(_Known(flights), world_size)


@lru_cache(maxsize=4)
def _analysed(known: _Known, world_size: int) -> Analysis:
    return analyse(known.flights, world_size)


def evidence(analysis: Analysis, ranks: Sequence[int], flights: Mapping[int, Flight] | None = None) -> list[Evidence]:
    """Return who waits where, the blocking wait first, and the last calls of these ranks, if there is a flight of them."""
    first = [analysis.blocking] if analysis.blocking else []
    others = [wait for wait in analysis.waits if wait.absent and wait != analysis.blocking]
    known = flights or {}
    shown = [rank for rank in ranks if rank in known][:MAX_RANKS]
    return [
        *(_waiting(wait) for wait in (*first, *others[:MAX_WAITS])),
        *(last_calls(rank, known[rank]) for rank in shown),
    ]


def last_calls(rank: int, flight: Flight, limit: int = MAX_CALLS, until: Call | None = None) -> Evidence:
    """Return the end of one rank's recorder, or its calls up to `until`, the newest at the bottom."""
    called = [call for call in flight.calls if until is None or _moment(call) <= _moment(until)]
    newest = sorted(called, key=_moment)[-limit:]
    names = descriptions(flight)
    is_cut = len(called) < len(flight.calls)
    what = f"calls of rank {rank} up to that one" if is_cut else f"last collectives of rank {rank}"
    if newest:
        last = f"its last is {place(newest[-1], names)}, {'over' if is_over(newest[-1]) else 'not over'}"
        lines = list(_lines(newest, names, flight.taken_ns))
    else:
        lines = list(_counts(flight, limit))
        last = "its recorder holds none, but counts how far it came in each group" if lines else "it has called none"
    return Evidence(
        kind="last_collectives", summary=what if is_cut else f"{what}: {last}", values={"rank": rank, "calls": lines}
    )


def _moment(call: Call) -> tuple[int, int]:
    return call.created_ns, call.record


def descriptions(flight: Flight) -> dict[str, str]:
    """Return the groups' names for people by their names in the recorder."""
    return {group.name: group.description or group.name for group in flight.groups}


def group_of(place: Wait | Deviation) -> str:
    """Return the name for people of the group of a wait or a deviation."""
    return group_name(place.group, place.description)


def group_name(group: str, description: str) -> str:
    """Return a group's description, such as `default_pg`, or its number if it has none."""
    return description if description not in ("", "undefined") else group


def place(call: Call, names: Mapping[str, str]) -> str:
    """Name a call: `all_reduce float32 [100], number 40 of group default_pg`."""
    name = group_name(call.group, names.get(call.group, ""))
    return f"{signature(call)}, number {call.sequence} of group {name}"


def _waiting(wait: Wait) -> Evidence:
    name = group_name(wait.group, wait.description)
    waits = "waits" if len(wait.entered) == 1 else "wait"
    has = "has" if len(wait.absent) == 1 else "have"
    absent = f"; {ranks_text(wait.absent)} {has} not entered it" if wait.absent else ""
    what = f"{ranks_text(wait.entered)} {waits} in {wait.signature}, number {wait.sequence} of group {name}{absent}"
    if wait.is_stopped:
        what = f"{ranks_text(wait.absent)} {has} not come out of {wait.signature}, number {wait.sequence} of group {name}, which others show completed; {ranks_text(wait.entered)} {waits} in later calls"
    return Evidence(
        kind="collective",
        summary=what,
        values={
            "group": name,
            "sequence": wait.sequence,
            "operation": wait.operation,
            "signature": wait.signature,
            "entered": list(wait.entered),
            "absent": list(wait.absent),
        },
    )


def _lines(calls: Sequence[Call], names: Mapping[str, str], taken_ns: int) -> Iterator[str]:
    words = [(_short(call.group, names.get(call.group, "")), f"#{call.sequence}", signature(call)) for call in calls]
    for call, line in zip(calls, _columns(words), strict=True):
        age_s = (taken_ns - call.created_ns) / 1e9 if taken_ns and call.created_ns else 0.0
        age = f"  -{age_s:.1f} s" if age_s >= MIN_AGE_S else ""
        where = f"  {_file(call.lines[0])}" if call.lines else ""
        yield f"{line}  {'over' if is_over(call) else 'open'}{age}{where}"


def _file(line: str) -> str:
    """Shorten `/home/me/train.py:41 in main` to `train.py:41` for a table."""
    return line.partition(" in ")[0].rpartition("/")[2]


def call_sites(calls: Mapping[int, Call]) -> Iterator[Evidence]:
    """Yield the script's lines that made the call: one piece of evidence for all ranks that made it at the same lines."""
    sides: dict[tuple[str, ...], list[int]] = {}
    for rank, call in sorted(calls.items()):
        if call.lines:
            sides.setdefault((signature(call), *call.lines), []).append(rank)
    for (what, *lines), ranks in list(sides.items())[:MAX_RANKS]:
        outer = f", called from {', '.join(lines[1:])}" if lines[1:] else ""
        place, _, function = lines[0].partition(" in ")
        file, _, number = place.rpartition(":")
        yield Evidence(
            kind="script_line",
            summary=f"{ranks_text(ranks)} called {what} at {place} in {function}{outer}",
            values={"ranks": ranks, "lines": lines, "file": file, "line": int(number) if number.isdigit() else 0},
        )


def _counts(flight: Flight, limit: int) -> Iterator[str]:
    """Yield the last number of each group, the most called first, for a recorder that holds no calls any more."""
    known = sorted((group for group in flight.groups if group.last_entered >= 0), key=lambda one: -one.last_entered)
    words = [(_short(group.name, group.description), f"#{group.last_entered}") for group in known[:limit]]
    for group, line in zip(known, _columns(words), strict=False):
        yield f"{line}  last entered, {'over' if group.last_completed >= group.last_entered else 'open'}"


def _short(group: str, description: str) -> str:
    """Shorten a group's name, so that lines of a table fit a terminal."""
    name = group_name(group, description)
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}\N{HORIZONTAL ELLIPSIS}"


def _columns(words: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    for row in words:
        yield "  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True))
