"""Ranks of a group that made different calls at one sequence number: who deviated, and how.

Who: the few deviated from the many. If both sides are equally many, the history decides: the group's calls repeat from step to step, and the
side that goes on as before is right. Without a history nobody can tell.
How: what a deviating rank called from there on is compared with what the others called, continued by the pattern of their history. A rank
whose first different call is its last has either left one out or swapped two: left out, if that call begins a step, since then nothing of the
step before is left.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holter.flight.analysis import Deviation, Kind
from holter.flight.board import Board, CallTable
from holter.flight.patterns import MAX_SHIFT, Pattern, align, is_within_step, pattern

MAX_IN_GROUP = 8
"""Ranks of one group whose deviations are reported."""


@dataclass(frozen=True)
class _Parting:
    """The first number at which ranks differ."""

    sequence: int
    sides: dict[int, list[int]]
    """Signature -> ranks."""
    history: list[int]
    """What all had called before."""
    pattern: Pattern | None


def deviations(board: Board, table: CallTable) -> Iterator[Deviation]:
    """What differs in one group, each rank's first deviation only."""
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
    """The longest history that any of the ranks has: up to here they agree."""
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
    """Which signature was to be called, and why we think so."""
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
        kind=kind_of_other(expected, seen),
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
    """`sides`: the signature that was to be called, and the one that was called instead."""
    right, wrong = ((side, sorted(parting.sides[side])) for side in sides)
    seen = max((_from(board, table, rank, parting.sequence) for rank in wrong[1][:4]), key=len)
    expected = max((_from(board, table, rank, parting.sequence) for rank in right[1][:4]), key=len)
    if parting.pattern is not None:
        expected = expected + _continued(parting, expected)
    times_ns = _times_ns(board, table, wrong[1][0], parting.sequence)
    kind, instead = kinds_of(board.texts, seen, expected, lambda by: _is_within(parting, times_ns, by))
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
    """When a rank made its calls up to there."""
    times = {
        call.sequence: call.created_ns
        for call in board.flights[rank].calls
        if call.group == table.name and not call.is_p2p and call.sequence < sequence
    }
    return [at_ns for _, at_ns in sorted(times.items())]


def _is_within(parting: _Parting, times_ns: list[int], by: int) -> bool:
    return parting.pattern is not None and is_within_step(times_ns, parting.pattern.period, by)


def _from(board: Board, table: CallTable, rank: int, sequence: int) -> list[int]:
    return [called for number, called in sorted(board.sequence(rank, table).items()) if number >= sequence]


def _continued(parting: _Parting, called: list[int]) -> list[int]:
    """What would follow if the group's history went on; nothing where the ranks themselves have left it."""
    assert parting.pattern is not None
    if parting.pattern.extended(parting.history, len(called)) != called:
        return []
    return parting.pattern.extended(parting.history + called, 2 * parting.pattern.period + MAX_SHIFT)


def kinds_of(
    texts: Sequence[str], seen: Sequence[int], expected: Sequence[int], is_within: Callable[[int], bool]
) -> tuple[Kind, Kind | None]:
    """How a rank's calls lie against what was to be called, and what it may be as well if its next call cannot be seen.

    `is_within`: whether the call so many after the expected one is surely not the first of its step.
    """
    instead = kind_of_other(texts[expected[0]], texts[seen[0]])
    alignment = align(seen, expected, is_similar=instead != "order")
    if alignment.shift == "missing":
        if len(seen) > 1 or instead != "order":
            return "missing", None
        return ("order", "missing") if is_within(alignment.by) else ("missing", "order")
    if alignment.shift == "extra":
        return "extra", None
    return ("order" if alignment.shift == "swapped" else instead), None


def kind_of_other(expected: str, seen: str) -> Kind:
    """One call in the place of another: the same operation with other dtypes or sizes, or another operation."""
    operation, _, rest = expected.partition(" ")
    other, _, other_rest = seen.partition(" ")
    if operation != other:
        return "order"
    return "dtype" if rest.partition(" [")[0] != other_rest.partition(" [")[0] else "shape"
