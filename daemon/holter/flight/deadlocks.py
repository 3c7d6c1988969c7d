"""Ranks that wait for each other in a cycle: one of them left out a call, made one too many, or made two in another order.

No sequence number shows it: rank 1 is in group B where it waits for rank 0, rank 0 in group A where it waits for rank 1. The ranks' own
histories show it: a rank that, over all its groups, did not call what it always called next has left its program. Without a history, where
several ranks belong to both groups, the few deviated from the many.
"""

from dataclasses import dataclass

from holter.flight.analysis import Deviation
from holter.flight.board import Board
from holter.flight.deviations import kinds_of
from holter.flight.patterns import MAX_SHIFT, Pattern, is_within_step, pattern
from holter.flight.reading import is_over
from holter.flight.waits import BlockedRanks, WaitCycle
from holter.records import Call

MAX_ASKED = 64
"""Ranks of one cycle whose history is looked at: the lowest."""
MAX_BACK = 64
"""Calls that a rank may have made after it left its program."""


@dataclass(frozen=True)
class _Step:
    """One call of a rank, as its program has it."""

    group: str
    text: str


@dataclass(frozen=True)
class _Departure:
    """Where a rank left its own program."""

    expected: _Step
    seen: Call
    kind_from: tuple[list[_Step], list[_Step]]
    times_ns: list[int]
    """When it made its calls up to there."""
    rounds: int
    period: int


def explain(board: Board, cycle: WaitCycle) -> Deviation | None:
    """Which ranks of a cycle deviated, and how; all of them if that is not known; None if each did what it always does."""
    asked = {rank: _departure(board, rank) for rank in cycle.ranks[:MAX_ASKED] if rank in board.flights}
    left = {rank: departure for rank, departure in asked.items() if isinstance(departure, _Departure)}
    if any(departure is None for departure in asked.values()) or len(left) == len(cycle.ranks):
        by_number = _by_number(board, cycle)
        if not by_number.is_clear or not left.keys() >= set(by_number.ranks):
            return by_number
        left = {rank: left[rank] for rank in by_number.ranks}
    return _by_history(board, cycle.ranks, left) if left else None


def _departure(board: Board, rank: int) -> _Departure | bool | None:
    """Where a rank left its program; False if it did not; None if there is no program to compare with.

    The calls that are not over are looked at first. If no history leads up to them, the rank left its program before: then it is the last
    place before them where it did not go on as it always had.
    """
    calls = [call for call in board.flights[rank].calls if not call.is_p2p]
    steps = [_Step(call.group, board.texts[board.number(call)]) for call in calls]
    begin = next((index for index, call in enumerate(calls) if not is_over(call)), len(calls))
    is_known = False
    for index in range(begin, len(calls)):
        found = pattern(steps[:index])
        is_known = is_known or found is not None
        if found is not None and found.extended(steps[:index], 1)[0] != steps[index]:
            return _left_at(calls, steps, index, found)
    if is_known:
        return False
    for index in range(begin - 1, max(begin - MAX_BACK, 0), -1):
        found = pattern(steps[:index])
        if found is not None:
            return _left_at(calls, steps, index, found) if found.extended(steps[:index], 1)[0] != steps[index] else None
    return None


def _left_at(calls: list[Call], steps: list[_Step], index: int, found: Pattern) -> _Departure:
    expected = found.extended(steps[:index], 2 * found.period + MAX_SHIFT)
    rounds = found.context // found.period + 1
    times_ns = [call.created_ns for call in calls[:index]]
    return _Departure(expected[0], calls[index], (steps[index:], expected), times_ns, rounds, found.period)


def _by_history(board: Board, cycle: tuple[int, ...], left: dict[int, _Departure]) -> Deviation:
    rank, departure = min(left.items())
    ranks = tuple(other for other, one in left.items() if one.expected == departure.expected)
    numbers: dict[_Step, int] = {}
    seen, expected = ([numbers.setdefault(step, len(numbers)) for step in steps] for steps in departure.kind_from)
    texts = [step.text if step.group == departure.expected.group else f"{step.group}:{step.text}" for step in numbers]
    kind, instead = kinds_of(texts, seen, expected, lambda by: is_within_step(departure.times_ns, departure.period, by))
    call = departure.seen
    is_about_seen = kind == "extra"
    group = call.group if is_about_seen else departure.expected.group
    table = board.tables[group]
    return Deviation(
        kind=kind,
        ranks=ranks,
        others=tuple(other for other in cycle if other not in left),
        group=group,
        description=table.description,
        sequence=call.sequence if is_about_seen else table.last(rank) + 1,
        operation=call.operation if is_about_seen else departure.expected.text.partition(" ")[0],
        expected=departure.expected.text,
        seen=board.texts[board.number(call)],
        is_clear=True,
        why=f"its own calls before that, {departure.rounds} times the same {departure.period}, go on otherwise; the others' do not",
        alternative=instead,
    )


def _by_number(board: Board, cycle: WaitCycle) -> Deviation:
    """The few deviated from the many, among ranks that belong to both of two groups; else nobody can tell."""
    inside = (block for block in cycle.blocked if block.wait)
    places = [(block, set(block.waiting) & set(cycle.ranks)) for block in inside]
    for block, ranks in sorted(places, key=lambda place: len(place[1])):
        assert block.wait is not None
        for other, many in places:
            assert other.wait is not None
            shared = set(board.tables[block.wait.group].members) & set(board.tables[other.wait.group].members)
            if other is not block and not ranks & many and len(ranks) < len(many & shared) and ranks <= shared:
                why = f"{len(many & shared)} ranks that belong to both groups went the other way"
                return _order(tuple(sorted(ranks)), tuple(sorted(many)), (other, block), why)
    first, second = places[0][0], places[-1][0]
    return _order(
        cycle.ranks, (), (first, second), "each waits for another in a cycle, and no history tells who left it"
    )


def _order(
    ranks: tuple[int, ...], others: tuple[int, ...], places: tuple[BlockedRanks, BlockedRanks], why: str
) -> Deviation:
    right, wrong = (place.wait for place in places)
    assert right is not None
    assert wrong is not None
    return Deviation(
        kind="order",
        ranks=ranks,
        others=others,
        group=right.group,
        description=right.description,
        sequence=right.sequence,
        operation=right.operation,
        expected=right.signature,
        seen=wrong.signature,
        is_clear=bool(others),
        why=why,
    )
