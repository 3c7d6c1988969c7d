"""Who is in a call that others have not come to: the waits of collectives, group by group.

A group has one wait for each set of ranks that it waits for. Ranks that entered a call and are still in it wait for every rank that is
known not to have entered; of a rank whose copy is from before the call, or that has no copy, nothing is known, so it is named only if there is
nobody else.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from holter.flight.board import Board, CallTable
from holter.flight.digests import signature
from holter.flight.verdicts import Wait
from holter.records import Call

MAX_IN_GROUP = 4
LASTING_NS = 2_000_000_000
"""Two ranks that wait for each other for so long are not just on their way."""


@dataclass(frozen=True)
class Standing:
    """Ranks that cannot go on before others come."""

    waiting: tuple[int, ...]
    awaited: tuple[int, ...]
    wait: Wait | None
    """None: they are all there, but some called something else."""
    since_ns: int = 0
    is_lasting: bool = True
    outdated: tuple[int, ...] = ()
    records: Mapping[int, int] = field(default_factory=dict)
    """Waiting rank -> which of all its calls it waits in."""


def standings(board: Board, table: CallTable) -> Iterator[Standing]:
    """The waits of one group's collectives, the earliest call first."""
    opened = sorted({sequence for track in table.tracks.values() for sequence in track.open})
    lasts = sorted({table.last(rank) for rank in table.members})
    if not opened or not lasts or opened[-1] <= lasts[0]:
        return
    bounds: list[int] = []
    for last in lasts[:MAX_IN_GROUP]:
        first = next((sequence for sequence in opened if sequence > last), None)
        if first is not None and first not in bounds:
            bounds.append(first)
    for sequence, end in zip(bounds, [*bounds[1:], opened[-1] + 1], strict=True):
        yield _standing(board, table, sequence, end)


def _standing(board: Board, table: CallTable, sequence: int, end: int) -> Standing:
    """Everyone who is in one of the calls from a number on, up to where somebody else is missing, too."""
    calls: dict[int, Call] = {}
    for rank, track in table.tracks.items():
        inside = [number for number in track.open if sequence <= number < end]
        if inside:
            calls[rank] = track.open[min(inside)]
    first = min(calls.values(), key=_by_sequence)
    candidates = [rank for rank in table.members if table.last(rank) < sequence]
    since_ns = max(call.created_ns for call in calls.values())
    absent, outdated = known_absent(board, candidates, since_ns)
    wait = Wait(
        group=table.name,
        description=table.description,
        sequence=sequence,
        operation=first.operation,
        signature=signature(first),
        entered=tuple(rank for rank in table.members if table.last(rank) >= sequence),
        absent=absent,
    )
    records = {rank: call.record for rank, call in calls.items()}
    return Standing(tuple(calls), absent, wait, since_ns, is_lasting(board, calls), outdated, records)


def _by_sequence(call: Call) -> int:
    return call.sequence


def known_absent(board: Board, ranks: Collection[int], since_ns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(who is absent, whose copy is too old to tell)."""
    fresh: list[int] = []
    old: list[int] = []
    for rank in ranks:
        flight = board.flights.get(rank)
        if flight is not None:
            (old if 0 < flight.taken_ns < since_ns else fresh).append(rank)
    return tuple(fresh or ranks), tuple(old)


def is_lasting(board: Board, calls: dict[int, Call]) -> bool:
    """By each rank's own clock, as of its copy. A dump without its time is of a job that hung."""
    return all(
        board.flights[rank].taken_ns == 0 or board.flights[rank].taken_ns - call.created_ns >= LASTING_NS
        for rank, call in calls.items()
    )
