"""NCCL's calls are queued: a rank that is stuck in one is stuck in all that it queued behind it, and so are the others in those.

    rank 8   all_to_all (waits for 9)   send to 0        rank 0   recv from 8: entered by both, and never over
                                                                  so rank 0 waits for 8, though 8 is there

Without this a rank that comes late because of such a call would look like the end of the chain.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from holter.flight import messages
from holter.flight.board import Board
from holter.flight.chains import ends, is_led
from holter.flight.reading import is_over
from holter.flight.waits import Standing
from holter.records import Call

MAX_ASKED = 64
"""Ends of chains that are looked at: the lowest ranks."""


def standings(board: Board, known: Sequence[Standing]) -> list[Standing]:
    """Ends of chains that are themselves in a call which others are in, too, and cannot get to."""
    found: list[Standing] = []
    stuck: dict[int, int] = {}
    for standing in known:
        for rank, record in standing.records.items():
            stuck[rank] = min(record, stuck.get(rank, record))
    talk: dict[int, list[tuple[Call, int, Call]]] = defaultdict(list)
    for rank, call, peer, its in messages.answered(board):
        talk[rank].append((call, peer, its))
    asked = sorted(ends(known, ()) & board.inside)[:MAX_ASKED]
    while asked:
        held_up = {rank: _held_up(board, rank, talk[rank], stuck, [*known, *found]) for rank in asked}
        new = [standing for standing in held_up.values() if standing is not None]
        if not new:
            break
        found += new
        for standing in new:
            stuck.update(standing.records)
        asked = [rank for rank in asked if held_up[rank] is None]
    return found


def _held_up(
    board: Board, rank: int, talk: Sequence[tuple[Call, int, Call]], stuck: Mapping[int, int], known: Sequence[Standing]
) -> Standing | None:
    """What one rank waits in without anybody being absent; a wait that leads back to the rank explains nothing."""
    for call, others in [*((call, [(peer, its)]) for call, peer, its in talk), *_collectives(board, rank)]:
        behind = tuple(
            other
            for other, its in others
            if other in stuck and its.record > stuck[other] and not is_led(other, rank, known)
        )
        if behind:
            return Standing((rank,), behind, None, records={rank: call.record})
    return None


def _collectives(board: Board, rank: int) -> Iterator[tuple[Call, list[tuple[int, Call]]]]:
    """A rank's open calls that all have entered, each with the others that are in it."""
    for call in board.flights[rank].calls:
        table = board.tables[call.group]
        if call.is_p2p or is_over(call) or any(table.last(member) < call.sequence for member in table.members):
            continue
        inside = ((member, table.tracks[member].open.get(call.sequence)) for member in table.members if member != rank)
        yield call, [(member, its) for member, its in inside if its is not None]
