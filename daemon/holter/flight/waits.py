"""Who is in a collective that others have not come to, and where the chains of such waits end.

A group has one wait for each set of ranks that it waits for. Ranks that entered a call and are still in it wait for every rank that is
known not to have entered. Of a rank without a copy, or with one from before the call, nothing is known: it is named only if there is
nobody else.

A rank that others wait for and that itself waits is a victim of what it waits for:

    tensor parallel group:  ranks 0,1 wait for 2,3      data parallel group:  ranks 2,3 wait for 7      the end is rank 7

Ranks that wait for each other in a cycle will wait for ever, whomever else they wait for.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holter.flight.analysis import Wait
from holter.flight.board import Board, CallTable
from holter.flight.digests import signature
from holter.records import Call

MAX_IN_GROUP = 4
LASTING_NS = 2_000_000_000
"""Ranks that wait for each other for this long are not just on their way."""


@dataclass(frozen=True)
class BlockedRanks:
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


def blocked_in_collectives(board: Board, table: CallTable) -> Iterator[BlockedRanks]:
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
        yield _blocked(board, table, sequence, end)


def _blocked(board: Board, table: CallTable, sequence: int, end: int) -> BlockedRanks:
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
    return BlockedRanks(tuple(calls), absent, wait, since_ns, is_lasting(board, calls), outdated, records)


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


@dataclass(frozen=True)
class WaitCycle:
    """Ranks that wait for each other, and the waits in which they do."""

    ranks: tuple[int, ...]
    blocked: tuple[BlockedRanks, ...]


def chain_ends(blocked: Sequence[BlockedRanks], excused: Collection[int]) -> set[int]:
    """Ranks that others wait for and that wait for nobody; without those for whom only `excused` ranks wait."""
    waiting = {rank for block in blocked for rank in block.waiting}
    awaited = {
        rank for block in blocked if any(waiter not in excused for waiter in block.waiting) for rank in block.awaited
    }
    return awaited - waiting


def waits_for(start: int, end: int, blocked: Sequence[BlockedRanks]) -> bool:
    """Whether one rank waits for another, directly or through others."""
    seen = {start}
    todo = list(blocked)
    while True:
        passed = [block for block in todo if not seen.isdisjoint(block.waiting)]
        if not passed or end in seen:
            return end in seen
        todo = [block for block in todo if seen.isdisjoint(block.waiting)]
        seen.update(rank for block in passed for rank in block.awaited)


def wait_cycles(blocked: Sequence[BlockedRanks]) -> list[WaitCycle]:
    """Cycles of waits. A wait is a node between its waiting and its awaited ranks: the cost grows with the waits, not with pairs of ranks."""
    edges: dict[int, list[int]] = defaultdict(list)
    for index, block in enumerate(blocked):
        edges[~index] = list(block.awaited)
        for rank in block.waiting:
            edges[rank].append(~index)
    for rank in {rank for block in blocked for rank in block.awaited}:
        edges.setdefault(rank, [])
    found = []
    for nodes in _strong_parts(edges):
        ranks = tuple(sorted(node for node in nodes if node >= 0))
        if len(ranks) > 1:
            found.append(WaitCycle(ranks, tuple(blocked[~node] for node in sorted(nodes, reverse=True) if node < 0)))
    return found


def _strong_parts(edges: dict[int, list[int]]) -> list[list[int]]:
    """Nodes that can reach each other (Tarjan, without recursion: a chain may be as long as the job has ranks)."""
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    parts: list[list[int]] = []
    for root, first in edges.items():
        path = [] if root in order else [(root, iter(first))]
        while path:
            node, ahead = path[-1]
            if node not in order:
                order[node] = lowest[node] = len(order)
                stack.append(node)
                on_stack.add(node)
            for to in ahead:
                if to not in order:
                    path.append((to, iter(edges[to])))
                    break
                if to in on_stack:
                    lowest[node] = min(lowest[node], order[to])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    cut = stack.index(node) if stack[-1] != node else len(stack) - 1
                    parts.append(stack[cut:])
                    on_stack.difference_update(stack[cut:])
                    del stack[cut:]
    return parts
