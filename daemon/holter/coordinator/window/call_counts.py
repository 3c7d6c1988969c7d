"""How many collectives of each group the ranks had called at the end of each step. Pure, incremental, bounded.

step 24   rank 0: 25   rank 1: 25
step 25   rank 0: 26   rank 1: 25      rank 1 left one out, and stays one behind
"""

from holter.faults.window import CallCounts
from holter.records import StepCalls

MAX_GROUPS = 64
MAX_STEPS = 512
"""Of one group, the newest."""
MAX_RANKS = 64
"""Of those that agree."""

_Steps = dict[int, dict[int, list[int]]]
"""Step -> last number -> ranks."""


class CallCountBook:
    """The newest steps of each group."""

    def __init__(self) -> None:
        self._groups: dict[str, _Steps] = {}
        self._counts: dict[str, tuple[CallCounts, ...]] = {}

    def add(self, rank: int, steps: list[StepCalls]) -> None:
        """Take one rank's report in."""
        for told in steps:
            for group, last in told.lasts.items():
                known = self._groups.get(group)
                if known is None:
                    if len(self._groups) >= MAX_GROUPS:
                        continue
                    known = self._groups[group] = {}
                ranks = known.setdefault(told.step, {}).setdefault(last, [])
                if len(ranks) < MAX_RANKS:
                    ranks.append(rank)
                if len(known) > MAX_STEPS:
                    del known[min(known)]
                self._counts.pop(group, None)

    def clear(self) -> None:
        """A rank lives in a new process: it counts from the beginning, and so will the others."""
        self._groups.clear()
        self._counts.clear()

    def counts(self) -> dict[str, tuple[CallCounts, ...]]:
        """Group -> its steps, ascending; the same objects as long as nothing changed."""
        for group in self._groups.keys() - self._counts.keys():
            steps = self._groups[group]
            self._counts[group] = tuple(
                CallCounts(step, {last: tuple(ranks) for last, ranks in steps[step].items()}) for step in sorted(steps)
            )
        return dict(self._counts)
