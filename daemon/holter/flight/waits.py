"""Who is in a collective or a message that others have not reached, and where the chains of such waits end.

A group has one wait for each set of ranks that it waits for. Ranks that entered a call and are still in it wait for
every rank that is known not to have entered. Of a rank without a copy, or with one from before the call, nothing is
known: it is named only if there is no other candidate.

A rank that others wait for and that itself waits is a victim of what it waits for.

    tensor-parallel group:  ranks 0,1 wait for 2,3      data-parallel group:  ranks 2,3 wait for 7      the end is rank 7

Ranks that wait for each other in a cycle will wait forever, whomever else they wait for.

Messages are exchanged between two ranks, which the recorder names: `send 0->1` and `recv 1<-0` (NCCL; gloo records
none). Each end counts the messages of a group on its own, so the numbers of the two ends agree only in some programs
(those in which each rank talks to one other). If the calls of a pair show that they agree, messages are matched by
number; otherwise by how many each end has open.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holter.flight.analysis import Deviation, Kind, Wait
from holter.flight.board import Board, CallTable
from holter.flight.digests import signature
from holter.flight.reading import is_over
from holter.records import Call, Flight

MAX_IN_GROUP = 4
LASTING_NS = 2_000_000_000
"""Nanoseconds after which ranks that wait for each other are not merely on their way."""
_NAMED = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
Line = tuple[str, int, int]
"""(group, sender, receiver) of messages."""


@dataclass(frozen=True)
class BlockedRanks:
    """Ranks that cannot continue before others arrive."""

    waiting: tuple[int, ...]
    awaited: tuple[int, ...]
    wait: Wait | None
    """The call in which they wait; None if all ranks are there, but some called something else."""
    since_ns: int = 0
    is_lasting: bool = True
    outdated: tuple[int, ...] = ()
    records: Mapping[int, int] = field(default_factory=dict)
    """For each waiting rank, the number of the call it waits in, among all its calls."""


def blocked_in_collectives(board: Board, table: CallTable) -> Iterator[BlockedRanks]:
    """Yield the waits in one group's collectives, earliest call first."""
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


def blocked_by_stopped(board: Board, table: CallTable) -> BlockedRanks | None:
    """Find ranks of a group that wait for others which have stopped: those have a call open that their peers completed.

    However many calls such a rank has queued behind it, it does not run them. gloo's recorder does not show what is
    completed.

    However much such a rank has queued behind it, it does not run. gloo's recorder does not say what is completed.

        ranks 0, 2   all_reduce 40 completed, 41 completed, 42 started
        rank 1       all_reduce 40 started, 41 to 50 queued
    """
    first = {rank: min(track.open) for rank, track in table.tracks.items() if track.open}
    completed = {one for one in sorted(set(first.values()))[:MAX_IN_GROUP] if _is_completed(table, one)}
    newest_ns = max((flight.calls[-1].created_ns for flight in board.flights.values() if flight.calls), default=0)
    stopped = tuple(
        sorted(
            rank
            for rank, sequence in first.items()
            if sequence in completed and _is_told(board.flights[rank], table.tracks[rank].open[sequence], newest_ns)
        )
    )
    waiting = {rank: table.tracks[rank].open[sequence] for rank, sequence in first.items() if rank not in stopped}
    if not stopped or not waiting:
        return None
    call = min((table.tracks[rank].open[first[rank]] for rank in stopped), key=lambda one: one.sequence)
    wait = Wait(
        group=table.name,
        description=table.description,
        sequence=call.sequence,
        operation=call.operation,
        signature=signature(call),
        entered=tuple(sorted(waiting)),
        absent=stopped,
        is_stopped=True,
    )
    records = {rank: one.record for rank, one in waiting.items()}
    since_ns = max(one.created_ns for one in waiting.values())
    return BlockedRanks(tuple(sorted(waiting)), stopped, wait, since_ns, records=records)


def _is_completed(table: CallTable, sequence: int) -> bool:
    """Whether some rank's recorder holds this call as completed."""
    held = (rank for ranks in table.rows.get(sequence, {}).values() for rank in ranks if rank in table.tracks)
    return any(sequence not in table.tracks[rank].open for rank in held)


def _is_told(flight: Flight, call: Call, newest_ns: int) -> bool:
    """Whether the recorder shows completion at all and this call has been open for long.

    It is long open if it is old, or if the copy is a dump that was made when a job hung.
    """
    is_dump = flight.taken_ns <= newest_ns
    is_old = flight.taken_ns - call.created_ns >= LASTING_NS
    return (is_dump or is_old) and any(one.state != "scheduled" for one in flight.calls)


def without(blocked: BlockedRanks, ranks: Collection[int]) -> BlockedRanks | None:
    """Remove ranks that have stopped rather than wait; None if no waiting rank is left."""
    waiting = tuple(rank for rank in blocked.waiting if rank not in ranks)
    return replace(blocked, waiting=waiting) if waiting else None


def _blocked(board: Board, table: CallTable, sequence: int, end: int) -> BlockedRanks:
    """Collect everyone in a call from `sequence` up to, but not including, `end`, from where on other ranks are missing, too."""
    calls: dict[int, Call] = {}
    for rank, track in table.tracks.items():
        inside = [number for number in track.open if sequence <= number < end]
        if inside:
            calls[rank] = track.open[min(inside)]
    first = min(calls.values(), key=lambda call: call.sequence)
    candidates = [rank for rank in table.members if table.last(rank) < sequence]
    since_ns = max(call.created_ns for call in calls.values())
    absent, outdated = _known_absent(board, candidates, since_ns)
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
    return BlockedRanks(tuple(calls), absent, wait, since_ns, _is_lasting(board, calls), outdated, records)


def _known_absent(board: Board, ranks: Collection[int], since_ns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that are absent, and those whose copy is too old to tell."""
    fresh: list[int] = []
    old: list[int] = []
    for rank in ranks:
        flight = board.flights.get(rank)
        if flight is not None:
            (old if 0 < flight.taken_ns < since_ns else fresh).append(rank)
    return tuple(fresh or ranks), tuple(old)


def _is_lasting(board: Board, calls: dict[int, Call]) -> bool:
    """Whether the calls were open for long at the time of the copy, by each rank's own clock.

    A dump without a time stems from a job that hung.
    """
    return all(
        board.flights[rank].taken_ns == 0 or board.flights[rank].taken_ns - call.created_ns >= LASTING_NS
        for rank, call in calls.items()
    )


@dataclass(frozen=True)
class WaitCycle:
    """Ranks that wait for each other, and the waits that form the cycle."""

    ranks: tuple[int, ...]
    blocked: tuple[BlockedRanks, ...]


def chain_ends(blocked: Sequence[BlockedRanks], excused: Collection[int]) -> set[int]:
    """Return ranks that are awaited and wait for nobody, except those awaited only by `excused` ranks."""
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
    """Find cycles of waits.

    A wait is a node between its waiting and its awaited ranks, so that the cost grows with the waits and not with pairs
    of ranks.
    """
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
    """Find the strongly connected components of a graph with Tarjan's algorithm.

    It does not recurse: a chain may be as long as the job has ranks.
    """
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


@dataclass(frozen=True)
class _End:
    """The messages of one rank to or from another, by number."""

    rank: int
    calls: dict[int, Call]

    @property
    def open(self) -> list[Call]:
        return [call for call in self.calls.values() if not is_over(call)]


def blocked_in_messages(board: Board) -> Iterator[BlockedRanks]:
    """Yield each rank that is in a message which the other end has not reached."""
    for (group, *_), (one, other) in _lines(board).items():
        for end, peer in ((one, other), (other, one)):
            call = _unanswered(end, peer)
            if call is None:
                continue
            absent, outdated = _known_absent(board, (peer.rank,), call.created_ns)
            description = board.tables[group].description
            wait = Wait(group, description, call.sequence, call.operation, signature(call), (end.rank,), absent)
            lasting = _is_lasting(board, {end.rank: call})
            yield BlockedRanks((end.rank,), absent, wait, call.created_ns, lasting, outdated, {end.rank: call.record})


def deviating_messages(board: Board) -> Iterator[Deviation]:
    """Yield the first message between each two ranks whose ends do not have the same size or dtype."""
    for (group, *_), (one, other) in _lines(board).items():
        if not _is_numbered_alike(one, other):
            continue
        for sequence in sorted(one.calls.keys() & other.calls.keys()):
            sent, received = one.calls[sequence], other.calls[sequence]
            kind = _difference(sent, received)
            if kind is not None:
                yield Deviation(
                    kind=kind,
                    ranks=tuple(sorted((one.rank, other.rank))),
                    others=(),
                    group=group,
                    description=board.tables[group].description,
                    sequence=sequence,
                    operation=sent.operation,
                    expected=_full(sent),
                    seen=_full(received),
                    is_clear=False,
                    why="a message has two ends, and either may be wrong",
                )
                break


def messages_under_way(board: Board) -> Iterator[tuple[int, Call, int, Call]]:
    """Yield messages that both ends are in and neither has completed, as (rank, its call, the other, its call), from both sides."""
    for one, other in _lines(board).values():
        for sequence in one.calls.keys() & other.calls.keys():
            sent, received = one.calls[sequence], other.calls[sequence]
            if not is_over(sent) and not is_over(received):
                yield one.rank, sent, other.rank, received
                yield other.rank, received, one.rank, sent


def _lines(board: Board) -> dict[Line, tuple[_End, _End]]:
    """Return the ends of every line on which a message is known: (sender's end, receiver's end)."""
    calls: dict[tuple[Line, bool], dict[int, Call]] = defaultdict(dict)
    for rank in board.senders:
        for call in board.flights[rank].calls:
            if not call.is_p2p:
                continue
            line = _line(board, rank, call)
            if line is not None:
                calls[line, line[1] == rank][call.sequence] = call
    lines = {line for line, _ in calls}
    return {
        line: (_End(line[1], calls.get((line, True), {})), _End(line[2], calls.get((line, False), {})))
        for line in sorted(lines)
    }


def _line(board: Board, rank: int, call: Call) -> Line | None:
    named = _NAMED.match(call.operation)
    if named is None:
        return None
    members = board.tables[call.group].members
    own, peer = int(named[2]), int(named[3])
    if max(own, peer) >= len(members) or members[own] != rank or own == peer:
        return None
    ends = (rank, members[peer]) if named[1] == "send" else (members[peer], rank)
    return call.group, *ends


def _is_numbered_alike(one: _End, other: _End) -> bool:
    """Whether the two ends use the same numbers for the messages that both recorders hold."""
    if not one.calls or not other.calls:
        return False
    low = max(min(one.calls), min(other.calls))
    high = min(max(one.calls), max(other.calls))
    numbers = {sequence for sequence in one.calls if low <= sequence <= high}
    return bool(numbers) and numbers == {sequence for sequence in other.calls if low <= sequence <= high}


def _unanswered(end: _End, peer: _End) -> Call | None:
    """Return the first open message of this end that the other end has not entered; None if there is none."""
    waiting = end.open
    if not waiting:
        return None
    if _is_numbered_alike(end, peer):
        return next((call for call in waiting if call.sequence not in peer.calls), None)
    num_answered = len(peer.open)
    return waiting[num_answered] if num_answered < len(waiting) else None


def _difference(sent: Call, received: Call) -> Kind | None:
    if sent.dtypes != received.dtypes and sent.dtypes and received.dtypes:
        return "dtype"
    if sent.sizes and received.sizes and _numel(sent) != _numel(received):
        return "shape"
    return None


def _numel(call: Call) -> int:
    """Return the number of elements: only this must agree, because each end may use a shape of its own."""
    return sum(map(math.prod, call.sizes))


def _full(call: Call) -> str:
    return f"{signature(call)} {' '.join(map(str, map(list, call.sizes)))}".strip()
