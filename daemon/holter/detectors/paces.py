"""What the counts of calls at the ends of steps tell: in which step a call was made, and who has called fewer than the others since when."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from holter.detectors.window import Pace

MIN_STEPS = 3
"""In which the counts agreed, and since when they have differed: a call at the border of two steps may count to either."""


@dataclass(frozen=True)
class Behind:
    """Ranks that have called fewer than their peers, ever since a step."""

    step: int
    by: int
    """Calls."""
    num_steps: int
    """For how many steps it was seen."""
    last: int
    """Their last number before."""


def step_of(paces: Sequence[Pace], sequence: int) -> int | None:
    """The step at whose end most ranks had made a call for the first time, or the first that has not ended; None: it cannot be told."""
    before: int | None = None
    for pace in paces:
        most = max(pace.lasts, key=lambda last: len(pace.lasts[last]))
        if most >= sequence:
            return pace.step if before is not None else None
        before = pace.step
    return before + 1 if before is not None else None


def behind(paces: Sequence[Pace], ranks: Collection[int], others: Collection[int]) -> Behind | None:
    """Whether these ranks, and not the others, have been the same number of calls behind ever since some step."""
    counted = list(_counted(paces, frozenset(ranks), frozenset(others)))
    num_behind = next(
        (back for back, (_, mine, theirs) in enumerate(reversed(counted)) if mine >= theirs), len(counted)
    )
    num_equal = len(counted) - num_behind
    by = {theirs - mine for _, mine, theirs in counted[num_equal:]}
    is_equal = all(mine == theirs for _, mine, theirs in counted[max(0, num_equal - MIN_STEPS) : num_equal])
    if num_behind < MIN_STEPS or num_equal < MIN_STEPS or len(by) != 1 or not is_equal:
        return None
    step, last, _ = counted[num_equal - 1]
    # A step in which a rank called nothing is not told by it.
    first = next(pace.step for pace in paces if pace.step > step and _of(pace, frozenset(others)) is not None)
    return Behind(first, by.pop(), num_behind, last)


def _counted(paces: Sequence[Pace], ranks: frozenset[int], others: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    """(step, their last number, the others') where both told and agree among themselves."""
    for pace in paces:
        mine, theirs = _of(pace, ranks), _of(pace, others)
        if mine is not None and theirs is not None:
            yield pace.step, mine, theirs


def _of(pace: Pace, ranks: frozenset[int]) -> int | None:
    said = [last for last, told in pace.lasts.items() if not ranks.isdisjoint(told)]
    return said[0] if len(said) == 1 else None
