"""Find ranks that left their program: which rank did not make the expected call, and what it did instead.

Within a group, the ranks are compared at one sequence number: the minority deviated from the majority. If both sides
are equally large, the history decides: a group's calls repeat from step to step, and the side that continues the
repetition is right. Without a history nobody can tell. The calls of a deviating rank from there on are compared with
the calls of the others, continued by the pattern of their history. If the first different call of a rank is also its
last, the rank has either left a call out or swapped two. It was left out if the call begins a step, because then
nothing of the step before can follow.

A cycle of waits shows at no sequence number: rank 1 is in group B where it waits for rank 0, and rank 0 is in group A
where it waits for rank 1. The ranks' own histories show it: a rank that, over all its groups, did not make the call
that always came next has left its program. Without a history, if several ranks belong to both groups, the minority
deviated from the majority.

A rank's next call is predicted to be the one that followed the last time that it had made the same calls:

    called so far   A B C  A B C  A B      the longest tail that occurred before is A B C A B, and C followed
    seen            ... A B   A B C A      C is missing: from here on the program is followed, one call ahead
    seen            ... A B X C A B C      X is extra
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeVar

from holter.flight.analysis import Deviation, Kind
from holter.flight.board import Board, CallTable
from holter.flight.reading import is_over
from holter.flight.waits import BlockedRanks, WaitCycle
from holter.records import Call

MIN_CONTEXT = 3
"""A repeated tail shorter than this many calls is not taken for a history."""
MAX_SHIFT = 64
"""Largest number of calls that may be missing or extra in one place."""

MAX_ROUNDS = 8
"""Number of repetitions over which the pauses between calls are measured."""

T = TypeVar("T", bound=Hashable)

Shift = Literal["missing", "swapped", "extra", "other"]
MAX_IN_GROUP = 8
"""Largest number of deviating ranks reported for one group."""
MAX_ASKED = 64
"""Largest number of ranks of one cycle whose history is examined, lowest ranks first."""
MAX_BACK = 64
"""Largest number of calls that a rank may have made since it left its program."""


@dataclass(frozen=True)
class Pattern:
    """The repetition at the end of a sequence of calls, from which it can be continued."""

    period: int
    context: int
    """Length of the tail that also occurs one period earlier."""

    def extended(self, history: Sequence[T], num: int) -> list[T]:
        """Return the next `num` items if the history keeps repeating."""
        items = list(history)
        for _ in range(num):
            items.append(items[-self.period])
        return items[len(history) :]


def pattern(history: Sequence[Hashable]) -> Pattern | None:
    """Find the longest tail of a history, at least one whole period, that also occurs earlier in it.

    None if there is no such tail, or if a tail as long was once followed by something else, as an occasional evaluation
    does.
    """
    backwards = history[::-1]
    repeats = _repeats(backwards)
    whole = [(length, -shift) for shift, length in enumerate(repeats, 1) if length >= max(MIN_CONTEXT, shift)]
    if not whole:
        return None
    context, period = max(whole)[0], -max(whole)[1]
    followed = {backwards[shift - 1] for shift, length in enumerate(repeats, 1) if length >= context}
    return Pattern(period, context) if len(followed) == 1 else None


def _repeats(items: Sequence[Hashable]) -> list[int]:
    """For each shift from 1, count how many leading items equal the items that many places further on (the Z function)."""
    num = len(items)
    lengths = [0] * num
    left = right = 0
    for shift in range(1, num):
        length = min(right - shift, lengths[shift - left]) if shift < right else 0
        while shift + length < num and items[length] == items[shift + length]:
            length += 1
        if shift + length > right:
            left, right = shift, shift + length
        lengths[shift] = length
    return lengths[1:]


def is_within_step(times_ns: Sequence[int], period: int, ahead: int) -> bool:
    """Whether the call `ahead` places after the next one certainly does not begin a step.

    The longest pause comes before the first call of a step: data, forward pass and the first part of the backward pass.
    `times_ns` says when the calls up to the next one were made.
    """
    pauses: list[list[int]] = [[] for _ in range(period)]
    for index in range(max(1, len(times_ns) - MAX_ROUNDS * period), len(times_ns)):
        pauses[index % period].append(times_ns[index] - times_ns[index - 1])
    if not all(pauses):
        return False
    usual = [median(one) for one in pauses]
    return 2 * usual[(len(times_ns) + ahead) % period] < max(usual)


@dataclass(frozen=True)
class Alignment:
    """How a rank's calls, from its first deviation on, line up with the expected calls."""

    shift: Shift
    by: int
    """Number of calls that are missing, extra or changed."""
    evidence: int
    """Number of calls that agree under this explanation."""


def align(seen: Sequence[int], expected: Sequence[int], *, is_similar: bool = False) -> Alignment:
    """Return the explanation with the fewest changes, and among those the one that most calls agree with.

    `seen[0]` differs from `expected[0]`. `is_similar`: both are the same operation with other sizes or dtypes, so that
    one probably stands for the other.
    """
    agreeing = _agreeing(seen[1:], expected[1:])
    other = Alignment("other", 1, agreeing or 0)
    # A single call that the program makes too, only later: the rank has gone ahead.
    if agreeing is None or (agreeing == 0 and seen[0] in expected):
        other = Alignment("other", MAX_SHIFT, 0)
    found = [other] if is_similar else []
    found += _shifted("missing", seen, expected, 1)
    if list(seen[:2]) == [*expected[1:2], expected[0]]:
        agreeing = _agreeing(seen[2:], expected[2:])
        found += [] if agreeing is None else [Alignment("swapped", 1, agreeing + 2)]
    found += _shifted("extra", expected, seen, 1)
    for by in range(2, MAX_SHIFT):
        found += _shifted("missing", seen, expected, by)
        found += _shifted("extra", expected, seen, by)
    return min([*found, other], key=lambda alignment: (alignment.by, -alignment.evidence))


def _shifted(shift: Shift, short: Sequence[int], long: Sequence[int], by: int) -> list[Alignment]:
    agreeing = _agreeing(short, long[by:])
    return [Alignment(shift, by, agreeing)] if agreeing else []


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Count the calls in the shorter sequence if the longer one begins with it; None if they differ before that."""
    num = min(len(one), len(other))
    return num if list(one[:num]) == list(other[:num]) else None


@dataclass(frozen=True)
class _Parting:
    """The first sequence number at which ranks of a group differ."""

    sequence: int
    sides: dict[int, list[int]]
    """Signature -> the ranks that called it."""
    history: list[int]
    """Signatures of the calls that all had made before."""
    pattern: Pattern | None


def deviations(board: Board, table: CallTable) -> Iterator[Deviation]:
    """Yield the first deviation of each rank in one group."""
    parted = sorted(sequence for sequence, row in table.rows.items() if len(row) > 1)
    explained: set[int] = set()
    for sequence in parted:
        sides = {
            side: [rank for rank in ranks if rank not in explained] for side, ranks in table.rows[sequence].items()
        }
        sides = {side: ranks for side, ranks in sides.items() if ranks}
        if len(sides) < 2:  # noqa: PLR2004
            continue
        history = _history(board, table, sides, sequence)
        for deviation in _judged(board, table, _Parting(sequence, sides, history, pattern(history))):
            explained.update(deviation.ranks)
            yield deviation
        if len(explained) >= MAX_IN_GROUP:
            return


def _history(board: Board, table: CallTable, sides: dict[int, list[int]], sequence: int) -> list[int]:
    """Return the longest history that a few ranks of each side hold; up to this number all ranks agree."""
    num_asked = 4
    ranks = [rank for side in sides.values() for rank in side[:num_asked]]
    memories = (
        [called for number, called in sorted(board.sequence(rank, table).items()) if number < sequence]
        for rank in ranks
    )
    return max(memories, key=len)


def _judged(board: Board, table: CallTable, parting: _Parting) -> Iterator[Deviation]:
    right, why = _right_side(parting)
    if right is None:
        yield _unclear(board, table, parting, why)
        return
    for side in parting.sides:
        if side != right:
            yield _explained(board, table, parting, (right, side), why)


def _right_side(parting: _Parting) -> tuple[int | None, str]:
    """Return the signature that was expected and the reason to think so; None with the reason if nobody can tell."""
    sides = sorted(parting.sides, key=lambda side: len(parting.sides[side]), reverse=True)
    most, next_most = (len(parting.sides[side]) for side in sides[:2])
    if most > next_most:
        total = sum(map(len, parting.sides.values()))
        return sides[0], f"{most} of {total} ranks of the group agree"
    if parting.pattern is None:
        return None, "as many ranks on each side, and no history to compare with"
    expected = parting.pattern.extended(parting.history, 1)[0]
    if expected not in parting.sides:
        return None, "as many ranks on each side, and neither goes on as before"
    rounds = parting.pattern.context // parting.pattern.period + 1
    return expected, f"the group's calls before that, {rounds} times the same {parting.pattern.period}, go on like this"


def _unclear(board: Board, table: CallTable, parting: _Parting, why: str) -> Deviation:
    one, other = sorted(parting.sides, key=lambda side: min(parting.sides[side]))[:2]
    ranks = tuple(sorted(rank for side in parting.sides.values() for rank in side))
    expected, seen = board.texts[one], board.texts[other]
    return Deviation(
        kind=_kind_of_other(expected, seen),
        ranks=ranks,
        others=(),
        group=table.name,
        description=table.description,
        sequence=parting.sequence,
        operation=expected.partition(" ")[0],
        expected=expected,
        seen=seen,
        is_clear=False,
        why=why,
    )


def _explained(board: Board, table: CallTable, parting: _Parting, sides: tuple[int, int], why: str) -> Deviation:
    """Describe the deviation of one side; `sides` holds the expected signature and the one that was called instead."""
    right, wrong = ((side, sorted(parting.sides[side])) for side in sides)
    seen = max((_from(board, table, rank, parting.sequence) for rank in wrong[1][:4]), key=len)
    expected = max((_from(board, table, rank, parting.sequence) for rank in right[1][:4]), key=len)
    if parting.pattern is not None:
        expected = expected + _continued(parting, expected)
    times_ns = _times_ns(board, table, wrong[1][0], parting.sequence)
    period = parting.pattern.period if parting.pattern else 0
    kind, instead = _kinds_of(
        board.texts, seen, expected, lambda by: period > 0 and is_within_step(times_ns, period, by)
    )
    texts = board.texts[right[0]], board.texts[wrong[0]]
    return Deviation(
        kind=kind,
        ranks=tuple(wrong[1]),
        others=tuple(right[1]),
        group=table.name,
        description=table.description,
        sequence=parting.sequence,
        operation=texts[kind == "extra"].partition(" ")[0],
        expected=texts[0],
        seen=texts[1],
        is_clear=True,
        why=why,
        alternative=instead,
    )


def _times_ns(board: Board, table: CallTable, rank: int, sequence: int) -> list[int]:
    """Return when the rank made its calls in this group before the sequence number."""
    times = {
        call.sequence: call.created_ns
        for call in board.flights[rank].calls
        if call.group == table.name and not call.is_p2p and call.sequence < sequence
    }
    return [at_ns for _, at_ns in sorted(times.items())]


def _from(board: Board, table: CallTable, rank: int, sequence: int) -> list[int]:
    return [called for number, called in sorted(board.sequence(rank, table).items()) if number >= sequence]


def _continued(parting: _Parting, called: list[int]) -> list[int]:
    """Return the calls that would follow if the group's history continued; empty if the ranks have already left it."""
    assert parting.pattern is not None
    if parting.pattern.extended(parting.history, len(called)) != called:
        return []
    return parting.pattern.extended(parting.history + called, 2 * parting.pattern.period + MAX_SHIFT)


def _kinds_of(
    texts: Sequence[str], seen: Sequence[int], expected: Sequence[int], is_within: Callable[[int], bool]
) -> tuple[Kind, Kind | None]:
    """Return the kind of a rank's deviation, and another possible kind if its next call cannot be seen.

    `is_within`: whether the call so many places after the expected one certainly does not begin a step.
    """
    instead = _kind_of_other(texts[expected[0]], texts[seen[0]])
    alignment = align(seen, expected, is_similar=instead != "order")
    if alignment.shift == "missing":
        if len(seen) > 1 or instead != "order":
            return "missing", None
        return ("order", "missing") if is_within(alignment.by) else ("missing", "order")
    if alignment.shift == "extra":
        return "extra", None
    return ("order" if alignment.shift == "swapped" else instead), None


def _kind_of_other(expected: str, seen: str) -> Kind:
    """Name the difference between two calls: the same operation with other dtypes or sizes, or another operation."""
    operation, _, rest = expected.partition(" ")
    other, _, other_rest = seen.partition(" ")
    if operation != other:
        return "order"
    return "dtype" if rest.partition(" [")[0] != other_rest.partition(" [")[0] else "shape"


@dataclass(frozen=True)
class _Step:
    """One call of a rank's program."""

    group: str
    text: str


@dataclass(frozen=True)
class _Departure:
    """The place at which a rank left its own program."""

    expected: _Step
    seen: Call
    kind_from: tuple[list[_Step], list[_Step]]
    times_ns: list[int]
    """When the rank made its calls up to this place."""
    rounds: int
    period: int


def explain_cycle(board: Board, cycle: WaitCycle) -> Deviation | None:
    """Find which ranks of a cycle deviated, and how.

    If that is not known, all of them are named. None if each rank did what it always does.
    """
    asked = {rank: _departure(board, rank) for rank in cycle.ranks[:MAX_ASKED] if rank in board.flights}
    left = {rank: departure for rank, departure in asked.items() if isinstance(departure, _Departure)}
    if any(departure is None for departure in asked.values()) or len(left) == len(cycle.ranks):
        by_number = _by_number(board, cycle)
        if not by_number.is_clear or not left.keys() >= set(by_number.ranks):
            return by_number
        left = {rank: left[rank] for rank in by_number.ranks}
    return _by_history(board, cycle.ranks, left) if left else None


def _departure(board: Board, rank: int) -> _Departure | bool | None:
    """Find where a rank left its program; False if it did not, None if there is no program to compare with.

    The calls that are not over are examined first. If no history leads up to them, the rank must have left its program
    earlier: at the last call before them that did not continue its history.
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
    call = departure.seen
    # Two groups are called by two independent parts of the program: a rank that leaves a call of one out goes on in the
    # other, and seldom comes back to it.
    is_other_group = call.group != departure.expected.group
    kind, instead = _kinds_of(
        texts,
        seen,
        expected,
        lambda by: not is_other_group and is_within_step(departure.times_ns, departure.period, by),
    )
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
    """Decide by number: among ranks that belong to both of two groups, the minority deviated. If that does not apply, nobody can tell."""
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
