"""Messages between two ranks, where the recorder says who they are: `send 0->1` and `recv 1<-0` (NCCL; gloo records none).

Each end counts the messages of a group on its own, so the numbers of the two ends agree only in some programs (each rank talks to one
other). Where the calls of a pair show that they agree, messages are matched by number; else by how many each end has open.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from holter.flight.analysis import Deviation, Kind, Wait
from holter.flight.board import Board
from holter.flight.digests import signature
from holter.flight.reading import is_over
from holter.flight.waits import BlockedRanks, is_lasting, known_absent
from holter.records import Call

_NAMED = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")

Line = tuple[str, int, int]
"""(group, sender, receiver)"""


@dataclass(frozen=True)
class _End:
    """One rank's messages on a line, by number."""

    rank: int
    calls: dict[int, Call]

    @property
    def open(self) -> list[Call]:
        return [call for call in self.calls.values() if not is_over(call)]


def blocked_in_messages(board: Board) -> Iterator[BlockedRanks]:
    """Who is in a message that the other end has not come to."""
    for (group, *_), (one, other) in _lines(board).items():
        for end, peer in ((one, other), (other, one)):
            call = _unanswered(end, peer)
            if call is None:
                continue
            absent, outdated = known_absent(board, (peer.rank,), call.created_ns)
            description = board.tables[group].description
            wait = Wait(group, description, call.sequence, call.operation, signature(call), (end.rank,), absent)
            lasting = is_lasting(board, {end.rank: call})
            yield BlockedRanks((end.rank,), absent, wait, call.created_ns, lasting, outdated, {end.rank: call.record})


def deviations(board: Board) -> Iterator[Deviation]:
    """Messages whose two ends do not have the same size or dtype: the first of each line."""
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
    """Messages that both ends are in and that are not over at either: (rank, its call, the other, its call), from both sides."""
    for one, other in _lines(board).values():
        for sequence in one.calls.keys() & other.calls.keys():
            sent, received = one.calls[sequence], other.calls[sequence]
            if not is_over(sent) and not is_over(received):
                yield one.rank, sent, other.rank, received
                yield other.rank, received, one.rank, sent


def _lines(board: Board) -> dict[Line, tuple[_End, _End]]:
    """Every line on which a message is known: (sender's end, receiver's end)."""
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
    """Whether the messages that both ends hold have the same numbers."""
    if not one.calls or not other.calls:
        return False
    low = max(min(one.calls), min(other.calls))
    high = min(max(one.calls), max(other.calls))
    numbers = {sequence for sequence in one.calls if low <= sequence <= high}
    return bool(numbers) and numbers == {sequence for sequence in other.calls if low <= sequence <= high}


def _unanswered(end: _End, peer: _End) -> Call | None:
    """The first message that this end is in and the other is not."""
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
    """Only the number of elements must agree: each end may keep them in a shape of its own."""
    return sum(map(math.prod, call.sizes))


def _full(call: Call) -> str:
    return f"{signature(call)} {' '.join(map(str, map(list, call.sizes)))}".strip()
