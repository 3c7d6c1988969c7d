"""Whether the ranks agreed on a class of tensors, step by step, since the start of the run. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from holter.faults.window import ClassHistory

Verdict = tuple[str, bool]
"""(tensor class, are all ranks equal)"""


def extend(histories: dict[str, ClassHistory], step: int, verdicts: Iterable[Verdict]) -> None:
    """Add the verdicts of one step; steps come in ascending order."""
    for name, is_equal in verdicts:
        known = histories.get(name) or ClassHistory(
            first_step=step,
            is_equal_at_first=is_equal,
            last_equal_step=None,
            first_unequal_step=None,
            num_equal=0,
            num_unequal=0,
        )
        histories[name] = _after(known, step, is_equal=is_equal)


def _after(known: ClassHistory, step: int, *, is_equal: bool) -> ClassHistory:
    has_differed = known.first_unequal_step is not None
    if is_equal:
        last_equal = known.last_equal_step if has_differed else step
        return replace(known, last_equal_step=last_equal, num_equal=known.num_equal + 1)
    first_unequal = known.first_unequal_step if has_differed else step
    return replace(known, first_unequal_step=first_unequal, num_unequal=known.num_unequal + 1)
