"""What the counts of calls at the ends of steps tell: in which step a call was made, and who has called fewer than the others since when."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holter.faults.window import CallCounts

MIN_STEPS = 3
"""In which the counts agreed, and since when they have differed: a call at the border of two steps may count to either."""

LOOK_BACK = 16
"""Steps before the first that differs: where ranks always counted otherwise, each step is a first."""


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


def step_of(counts: Sequence[CallCounts], sequence: int) -> int | None:
    """The step at whose end most ranks had made a call for the first time, or the first that has not ended; None: it cannot be told."""
    before: int | None = None
    for pace in counts:
        most = max(pace.lasts, key=lambda last: len(pace.lasts[last]))
        if most >= sequence:
            return pace.step if before is not None else None
        before = pace.step
    return before + 1 if before is not None else None


def behind(
    counts: Sequence[CallCounts], ranks: Collection[int], others: Collection[int], num_steps: int = MIN_STEPS
) -> Behind | None:
    """Whether these ranks, and not the others, have been the same number of calls behind ever since some step, and for so many."""
    counted = list(_counted(counts, frozenset(ranks), frozenset(others)))
    num_behind = next(
        (back for back, (_, mine, theirs) in enumerate(reversed(counted)) if mine >= theirs), len(counted)
    )
    num_equal = len(counted) - num_behind
    by = {theirs - mine for _, mine, theirs in counted[num_equal:]}
    is_equal = all(mine == theirs for _, mine, theirs in counted[max(0, num_equal - MIN_STEPS) : num_equal])
    if num_behind < num_steps or num_equal < MIN_STEPS or len(by) != 1 or not is_equal:
        return None
    step, last, _ = counted[num_equal - 1]
    # A step in which a rank called nothing is not told by it.
    first = next(pace.step for pace in counts if pace.step > step and _of(pace, frozenset(others)) is not None)
    return Behind(first, by.pop(), num_behind, last)


def are_counted(counts: Mapping[str, Sequence[CallCounts]], ranks: Collection[int], step: int) -> bool:
    """Whether all that will tell `left_out` of this step is there: what these ranks had called by the ends of the next steps."""
    for told in counts.values():
        newest = {rank: pace.step for pace in told for some in pace.lasts.values() for rank in some}
        if any(newest[rank] < step + MIN_STEPS - 1 for rank in ranks if rank in newest):
            return False
    return True


def left_out(counts: Sequence[CallCounts]) -> tuple[tuple[int, ...], tuple[int, ...], Behind] | None:
    """(who, the others, how far) of ranks that made too few calls in one step, while the others made as many as ever.

    Only the steps right after it are looked at: somebody may stop the job over it, and ranks that are held count otherwise.
    """
    for index, pace in enumerate(counts):
        if len(pace.lasts) < 2:  # noqa: PLR2004 - all agree
            continue
        ranks = pace.lasts[min(pace.lasts)]
        others = tuple(sorted(rank for told in pace.lasts.values() for rank in told if rank not in ranks))
        around = counts[max(0, index - LOOK_BACK) : index + MIN_STEPS]
        found = behind(around, ranks, others, num_steps=MIN_STEPS - 1)
        if found is not None and _is_as_ever(counts, others, found.step):
            return ranks, others, found
    return None


def _is_as_ever(counts: Sequence[CallCounts], ranks: Sequence[int], step: int) -> bool:
    """Whether these ranks made as many calls in this step as in the one before; else it was they who called too often."""
    told = [(pace.step, last) for pace in counts if (last := _of(pace, frozenset(ranks))) is not None]
    at = next(index for index, (then, _) in enumerate(told) if then == step)
    (_, earlier), (_, before), (_, now) = told[at - 2 : at + 1]
    return now - before == before - earlier


def _counted(
    counts: Sequence[CallCounts], ranks: frozenset[int], others: frozenset[int]
) -> Iterator[tuple[int, int, int]]:
    """(step, their last number, the others') where both told and agree among themselves."""
    for pace in counts:
        mine, theirs = _of(pace, ranks), _of(pace, others)
        if mine is not None and theirs is not None:
            yield pace.step, mine, theirs


def _of(pace: CallCounts, ranks: frozenset[int]) -> int | None:
    said = [last for last, told in pace.lasts.items() if not ranks.isdisjoint(told)]
    return said[0] if len(said) == 1 else None
