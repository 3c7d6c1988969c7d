"""Compare all ranks' Flight Recorders: who waits for whom, who called something else, and who is to blame.

board       flights -> a table for each group
deviations  tables -> ranks that called something else than their group; a cycle of waits -> who left the program
waits       tables -> ranks that are in a call which others have not come to; where such waits end, and cycles without an end
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import msgspec

from holter.flight import deviations, waits
from holter.flight.analysis import Analysis, Deviation, Wait
from holter.flight.board import Board, CallTable
from holter.flight.reading import is_over
from holter.flight.waits import BlockedRanks, chain_ends, waits_for
from holter.records import Call, Flight

MAX_CHAIN_ENDS = 64
"""Largest number of chain ends that are examined, lowest ranks first."""


def analyse(flights: Mapping[int, Flight], world_size: int = 0) -> Analysis:
    """Analyse what the ranks did when their recorders were copied. The cost grows with the number of calls."""
    apart, names = _with_unique_names(flights)
    return _with_recorded_names(_analyse(apart, world_size), names)


def _analyse(flights: Mapping[int, Flight], world_size: int) -> Analysis:
    board = Board(flights, world_size)
    tables = list(board.tables.values())
    deviated = [deviation for table in tables for deviation in deviations.deviations(board, table)]
    deviated += waits.deviating_messages(board)
    blocked = [one for table in tables for one in waits.blocked_in_collectives(board, table)]
    blocked += waits.blocked_in_messages(board)
    by_stopped = [one for table in tables if (one := waits.blocked_by_stopped(board, table)) is not None]
    stopped = {rank for one in by_stopped for rank in one.awaited}
    blocked = [*by_stopped, *(kept for one in blocked if (kept := waits.without(one, stopped)) is not None)]
    blocked += [stuck for deviation in deviated for stuck in _stuck(board, deviation)]
    blocked += _blocked_in_queues(board, blocked)
    departed = {rank for deviation in deviated for rank in deviation.ranks}
    circular: set[int] = set()
    for cycle in waits.wait_cycles(blocked):
        if not departed & set(cycle.ranks) and all(one.is_lasting for one in cycle.blocked):
            explained = deviations.explain_cycle(board, cycle)
            deviated += [explained] if explained else []
            circular |= set(explained.ranks if explained else cycle.ranks)
    excused = circular | {rank for deviation in deviated for rank in _excused(board, deviation)}
    culprits = waits.chain_ends(blocked, excused) | departed | circular
    members = {rank for table in tables for rank in table.members} | set(range(world_size))
    return Analysis(
        matched={table.name: _matched(board, table, deviated) for table in tables},
        waits=tuple(one.wait for one in blocked if one.wait is not None),
        deviations=tuple(deviated),
        culprits=tuple(sorted(culprits)),
        victims=tuple(sorted(board.inside - culprits)) if culprits else (),
        blocking=_blocking(blocked, culprits),
        unknown=tuple(sorted(members - flights.keys())),
        outdated=tuple(sorted({rank for one in blocked for rank in one.outdated})),
    )


def _stuck(board: Board, deviation: Deviation) -> list[BlockedRanks]:
    """Return the ranks in a call that others deviated from, or in a later one: they wait for the deviating ranks."""
    table = board.tables[deviation.group]
    waiting = tuple(
        rank
        for rank in deviation.others
        if rank in table.tracks and any(number >= deviation.sequence for number in table.tracks[rank].open)
    )
    return [BlockedRanks(waiting, deviation.ranks, None)] if waiting else []


def _excused(board: Board, deviation: Deviation) -> tuple[int, ...]:
    """Return the ranks that wait because of their own deviation, in the deviating call itself or one call ahead of the others."""
    table = board.tables[deviation.group]
    is_open = any(deviation.sequence in track.open for track in table.tracks.values())
    return deviation.ranks if is_open or deviation.kind == "extra" else ()


def _matched(board: Board, table: CallTable, deviated: Sequence[Deviation]) -> int:
    """Return the last sequence number that all ranks of a group entered with the same call.

    For a rank without a recording, calls that others completed with it count.
    """
    known = [rank for rank in table.members if rank in board.flights]
    last = min((table.last(rank) for rank in known), default=-1)
    if len(known) < len(table.members):
        open_from = min((min(track.open) for track in table.tracks.values() if track.open), default=last + 1)
        last = min(last, open_from - 1)
    parted = [one.sequence for one in deviated if one.group == table.name and one.seen != one.expected]
    return min([last, *(sequence - 1 for sequence in parted)])


def _blocking(blocked: Sequence[BlockedRanks], culprits: set[int] | frozenset[int]) -> Wait | None:
    """Return the wait that names most of the culprits; among several, the one with most waiting ranks, then the oldest."""
    named = [one for one in blocked if one.wait is not None and culprits & set(one.awaited)]
    if not named:
        return None
    return min(named, key=lambda one: (-len(culprits & set(one.awaited)), -len(one.waiting), one.since_ns)).wait


def _blocked_in_queues(board: Board, known: Sequence[BlockedRanks]) -> list[BlockedRanks]:
    """Find ends of chains that are themselves blocked by a call that is queued behind a stuck one.

    NCCL's calls are queued: a rank that is stuck in one is stuck in all that it queued behind it, and so are the others in those.

        rank 8   all_to_all (waits for 9)   send to 0        rank 0   recv from 8: entered by both, and never over
                                                                      so rank 0 waits for 8, though 8 is there

    Without this, a rank that comes late because of such a call would look like the end of the chain.
    """
    found: list[BlockedRanks] = []
    stuck: dict[int, int] = {}
    for block in known:
        for rank, record in block.records.items():
            stuck[rank] = min(record, stuck.get(rank, record))
    talk: dict[int, list[tuple[Call, int, Call]]] = defaultdict(list)
    for rank, call, peer, its in waits.messages_under_way(board):
        talk[rank].append((call, peer, its))
    asked = sorted(chain_ends(known, ()) & board.inside)[:MAX_CHAIN_ENDS]
    while asked:
        held_up = {rank: _held_up_in(board, rank, talk[rank], stuck, [*known, *found]) for rank in asked}
        new = [block for block in held_up.values() if block is not None]
        if not new:
            break
        found += new
        for block in new:
            stuck.update(block.records)
        asked = [rank for rank in asked if held_up[rank] is None]
    return found


def _held_up_in(
    board: Board,
    rank: int,
    talk: Sequence[tuple[Call, int, Call]],
    stuck: Mapping[int, int],
    known: Sequence[BlockedRanks],
) -> BlockedRanks | None:
    """Find the call in which a rank is blocked although all its ranks have entered it.

    A wait that leads back to the rank itself explains nothing and is ignored.
    """
    for call, others in [*((call, [(peer, its)]) for call, peer, its in talk), *_entered_by_all(board, rank)]:
        behind = tuple(
            other
            for other, its in others
            if other in stuck and its.record > stuck[other] and not waits_for(other, rank, known)
        )
        if behind:
            return BlockedRanks((rank,), behind, None, records={rank: call.record})
    return None


def _entered_by_all(board: Board, rank: int) -> Iterator[tuple[Call, list[tuple[int, Call]]]]:
    """Yield a rank's open calls that every member has entered, each with the other ranks that are still in it."""
    for call in board.flights[rank].calls:
        table = board.tables[call.group]
        if call.is_p2p or is_over(call) or any(table.last(member) < call.sequence for member in table.members):
            continue
        inside = ((member, table.tracks[member].open.get(call.sequence)) for member in table.members if member != rank)
        yield call, [(member, its) for member, its in inside if its is not None]


def _with_unique_names(flights: Mapping[int, Flight]) -> tuple[Mapping[int, Flight], dict[str, str]]:
    """Rename groups so that each name means one group; also return the recorded name of each new one.

        7: ranks 0,1      7: ranks 2,3        ->        7 of 0: ranks 0,1      7 of 2: ranks 2,3        ->        7, 7

    Disjoint groups of one name are told apart by their members. Where groups of one name share a rank, a number would mean two of its calls:
    such names stay as they are.
    """
    said: dict[str, set[tuple[int, ...]]] = {}
    for flight in flights.values():
        for group in flight.groups:
            if group.ranks:
                said.setdefault(group.name, set()).add(group.ranks)
    shared = {
        name: groups
        for name, groups in said.items()
        if len(groups) > 1 and all(set(one).isdisjoint(other) for one, other in combinations(groups, 2))
    }
    if not shared:
        return flights, {}
    names: dict[str, str] = {}
    of_rank: dict[int, dict[str, str]] = {}
    for name, groups in shared.items():
        for members in groups:
            apart = f"{name} of {min(members)}"
            names[apart] = name
            for rank in members:
                of_rank.setdefault(rank, {})[name] = apart
    return {
        rank: _renamed(flight, of_rank[rank]) if rank in of_rank else flight for rank, flight in flights.items()
    }, names


def _with_recorded_names(analysis: Analysis, names: dict[str, str]) -> Analysis:
    """Return the analysis with the group names that the recorders use."""
    if not names:
        return analysis
    matched: dict[str, int] = {}
    for group, last in analysis.matched.items():
        name = names.get(group, group)
        matched[name] = min(last, matched.get(name, last))
    return replace(
        analysis,
        matched=matched,
        waits=tuple(replace(one, group=names.get(one.group, one.group)) for one in analysis.waits),
        deviations=tuple(replace(one, group=names.get(one.group, one.group)) for one in analysis.deviations),
        blocking=analysis.blocking
        and replace(analysis.blocking, group=names.get(analysis.blocking.group, analysis.blocking.group)),
    )


def _renamed(flight: Flight, names: dict[str, str]) -> Flight:
    return Flight(
        groups=[msgspec.structs.replace(group, name=names.get(group.name, group.name)) for group in flight.groups],
        calls=[
            msgspec.structs.replace(call, group=names[call.group]) if call.group in names else call
            for call in flight.calls
        ],
        taken_ns=flight.taken_ns,
    )
