"""All ranks' flights, laid side by side: who waits for whom, who called something else, and who is to blame.

board       flights -> a table for each group
deviations  tables -> ranks that called something else than their group
waits       tables -> ranks that are in a call which others have not come to; messages: the same for sends and receives
chains      waits -> where they end, and circles without an end
deadlocks   a circle -> who left the program
"""

from collections.abc import Mapping, Sequence

from holter.flight import chains, deadlocks, deviations, messages, queues, waits
from holter.flight.board import Board, CallTable
from holter.flight.namesakes import named_as_before, told_apart
from holter.flight.verdicts import Analysis, Deviation, Kind, Wait
from holter.flight.waits import Standing
from holter.records import Flight

__all__ = ["Analysis", "Deviation", "Kind", "Wait", "analyse"]


def analyse(flights: Mapping[int, Flight], world_size: int = 0) -> Analysis:
    """A description of one moment. It costs about what the flights hold."""
    apart, names = told_apart(flights)
    return named_as_before(_analyse(apart, world_size), names)


def _analyse(flights: Mapping[int, Flight], world_size: int) -> Analysis:
    board = Board(flights, world_size)
    tables = list(board.tables.values())
    deviated = [deviation for table in tables for deviation in deviations.deviations(board, table)]
    deviated += messages.deviations(board)
    standing = [one for table in tables for one in waits.standings(board, table)]
    standing += messages.standings(board)
    standing += [stuck for deviation in deviated for stuck in _stuck(board, deviation)]
    standing += queues.standings(board, standing)
    departed = {rank for deviation in deviated for rank in deviation.ranks}
    circular: set[int] = set()
    for circle in chains.circles(standing):
        if not departed & set(circle.ranks) and all(one.is_lasting for one in circle.standings):
            explained = deadlocks.explain(board, circle)
            deviated += [explained] if explained else []
            circular |= set(explained.ranks if explained else circle.ranks)
    excused = circular | {rank for deviation in deviated for rank in _excused(board, deviation)}
    culprits = chains.ends(standing, excused) | departed | circular
    members = {rank for table in tables for rank in table.members} | set(range(world_size))
    return Analysis(
        matched={table.name: _matched(board, table, deviated) for table in tables},
        waits=tuple(one.wait for one in standing if one.wait is not None),
        deviations=tuple(deviated),
        culprits=tuple(sorted(culprits)),
        victims=tuple(sorted(board.inside - culprits)) if culprits else (),
        blocking=_blocking(standing, culprits),
        unknown=tuple(sorted(members - flights.keys())),
        outdated=tuple(sorted({rank for one in standing for rank in one.outdated})),
    )


def _stuck(board: Board, deviation: Deviation) -> list[Standing]:
    """Ranks that are in a call, or behind one, that others deviated from, wait for those."""
    table = board.tables[deviation.group]
    waiting = tuple(
        rank
        for rank in deviation.others
        if rank in table.tracks and any(number >= deviation.sequence for number in table.tracks[rank].open)
    )
    return [Standing(waiting, deviation.ranks, None)] if waiting else []


def _excused(board: Board, deviation: Deviation) -> tuple[int, ...]:
    """Ranks that wait because of where their own deviation led them: in the call itself, or one call ahead of the others."""
    table = board.tables[deviation.group]
    is_open = any(deviation.sequence in track.open for track in table.tracks.values())
    return deviation.ranks if is_open or deviation.kind == "extra" else ()


def _matched(board: Board, table: CallTable, deviated: Sequence[Deviation]) -> int:
    """The last number that all ranks of a group entered alike; of a rank without a flight, what others completed with it."""
    known = [rank for rank in table.members if rank in board.flights]
    last = min((table.last(rank) for rank in known), default=-1)
    if len(known) < len(table.members):
        open_from = min((min(track.open) for track in table.tracks.values() if track.open), default=last + 1)
        last = min(last, open_from - 1)
    parted = [one.sequence for one in deviated if one.group == table.name and one.seen != one.expected]
    return min([last, *(sequence - 1 for sequence in parted)])


def _blocking(standing: Sequence[Standing], culprits: set[int] | frozenset[int]) -> Wait | None:
    """The wait that names most of the culprits; of several the one that lasts longest."""
    named = [one for one in standing if one.wait is not None and culprits & set(one.awaited)]
    if not named:
        return None
    return min(named, key=lambda one: (-len(culprits & set(one.awaited)), -len(one.waiting), one.since_ns)).wait
