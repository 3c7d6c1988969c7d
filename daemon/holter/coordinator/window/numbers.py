"""The numbers of each step as their spread over the ranks, remembered far longer than the steps themselves. Pure.

    rank 0 step 40  loss 1.5      step 40  loss  mean 1.6, low 1.5 on rank 0, high 1.7 on rank 1
    rank 1 step 40  loss 1.7

A rank's record costs an addition for each of its numbers, and nothing of it is kept; of what a script logs the ranks' own values are
kept while the step may still change, for it may log the same name twice. Sums are exact, so that the order of arrival cannot be seen.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import islice

from holter.faults.window import Spread, StepNumbers
from holter.records import StepDone

MAX_STEPS = 4096
"""Steps whose numbers are remembered."""
MAX_NAMES = 64
"""Numbers believed of one record."""
MAX_NAMES_OF_STEP = 512
"""Different names kept of one step."""
MAX_OPEN = 2048
"""Steps that may still change; more than the assembly holds at once, so that only logs of steps that never come are dropped."""

OWN = ("loss", "gradient_norm", "learning_rate", "micro_steps", "seconds")
"""Fields of StepDone. What a script logs under such a name is found under `log.<name>`."""

_EXPONENT = 1074
"""The smallest float is 2 ** -1074: every float is a whole multiple of it."""


class NumberTally:
    """One number over the ranks, taken in one by one."""

    __slots__ = ("_high", "_high_rank", "_low", "_low_rank", "_num", "_num_nonfinite", "_total")

    def __init__(self) -> None:
        self._num = 0
        self._num_nonfinite = 0
        self._total = 0
        """Sum of the finite values, in units of the smallest float."""
        self._low, self._low_rank = math.inf, -1
        self._high, self._high_rank = -math.inf, -1

    def add(self, rank: int, value: float) -> None:
        """One rank's value; of equal extremes the lowest rank is named."""
        self._num += 1
        if not math.isfinite(value):
            self._num_nonfinite += 1
            return
        numerator, denominator = value.as_integer_ratio()
        self._total += numerator << (_EXPONENT + 1 - denominator.bit_length())
        if value < self._low or (value == self._low and rank < self._low_rank):
            self._low, self._low_rank = value, rank
        if value > self._high or (value == self._high and rank < self._high_rank):
            self._high, self._high_rank = value, rank

    def spread(self) -> Spread:
        """As of now; NaN and rank -1 where no value was finite."""
        num_finite = self._num - self._num_nonfinite
        if not num_finite:
            return Spread(math.nan, math.nan, math.nan, -1, -1, self._num, self._num_nonfinite)
        return Spread(
            mean=self._total / (num_finite << _EXPONENT),
            low=self._low,
            high=self._high,
            low_rank=self._low_rank,
            high_rank=self._high_rank,
            num=self._num,
            num_nonfinite=self._num_nonfinite,
        )


class _OpenNumbers:
    """A step that may still change."""

    def __init__(self) -> None:
        self.tallies: dict[str, NumberTally] = {}
        self.logged: dict[str, dict[int, float]] = {}
        self.entry: StepNumbers | None = None

    def spreads(self) -> dict[str, Spread]:
        found = {name: tally.spread() for name, tally in self.tallies.items()}
        for name, values in self.logged.items():
            tally = NumberTally()
            for rank, value in values.items():
                tally.add(rank, value)
            found[name] = tally.spread()
        return dict(sorted(found.items()))


class NumberBook:
    """The numbers of all steps that are remembered."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenNumbers] = {}
        self._kept: dict[int, StepNumbers] = {}

    def add(self, step: int, rank: int, done: StepDone) -> None:
        """A rank's first record of a step; the caller gives no second one."""
        known = self._at(step)
        tallies, known.entry = known.tallies, None
        for name, value in _numbers(done):
            tally = tallies.get(name)
            if tally is None:
                if len(tallies) >= MAX_NAMES_OF_STEP:
                    continue
                tally = tallies[name] = NumberTally()
            tally.add(rank, value)

    def log(self, step: int, rank: int, values: Mapping[str, float]) -> None:
        """What the script of one rank logged: the last value of a name counts."""
        said = {f"log.{name}" if name in OWN else name: value for name, value in islice(values.items(), MAX_NAMES)}
        if step in self._kept:
            self._kept[step] = _joined(self._kept[step], rank, said)
            return
        known = self._at(step)
        known.entry = None
        for name, value in said.items():
            if name in known.logged or len(known.logged) < MAX_NAMES_OF_STEP:
                known.logged.setdefault(name, {})[rank] = value

    def has(self, step: int) -> bool:
        """Whether this step has left the assembly and is remembered."""
        return step in self._kept

    def entry(self, step: int, at_ns: int) -> StepNumbers:
        """One step; the same object as long as nothing changed."""
        known = self._at(step)
        if known.entry is None or known.entry.at_ns != at_ns:
            known.entry = StepNumbers(step, at_ns, known.spreads())
        return known.entry

    def keep(self, step: int, at_ns: int) -> None:
        """This step is complete and leaves the assembly, and so does everything before it."""
        self._kept[step] = self.entry(step, at_ns)
        self.forget_until(step)
        while len(self._kept) > MAX_STEPS:
            del self._kept[next(iter(self._kept))]

    def forget_until(self, step: int) -> None:
        """This step and those before it change no more."""
        for old in [known for known in self._open if known <= step]:
            del self._open[old]

    def take_back(self, step: int) -> None:
        """What was said of this step and later ones did not happen."""
        # Thousands of ranks begin again together: only the first of them finds anything.
        if max(self._open, default=-1) < step and next(reversed(self._kept), -1) < step:
            return
        self._open = {known: value for known, value in self._open.items() if known < step}
        self._kept = {known: value for known, value in self._kept.items() if known < step}

    def remembered(self) -> tuple[StepNumbers, ...]:
        """The steps that have left the assembly, ascending."""
        return tuple(self._kept.values())

    def _at(self, step: int) -> _OpenNumbers:
        known = self._open.get(step)
        if known is None:
            if len(self._open) >= MAX_OPEN:
                del self._open[min(self._open)]
            known = self._open[step] = _OpenNumbers()
        return known


def _numbers(done: StepDone) -> Iterator[tuple[str, float]]:
    for name in OWN:
        value = getattr(done, name)
        if value is not None:
            yield name, float(value)
    for name, value in islice(done.numbers.items(), MAX_NAMES):
        if name not in OWN:
            yield name, value


def _joined(entry: StepNumbers, rank: int, said: Mapping[str, float]) -> StepNumbers:
    """Late values for a step that has left the assembly: a name that nobody logged is added, the rest comes too late."""
    late = {name: _alone(rank, value) for name, value in said.items() if name not in entry.numbers}
    return StepNumbers(entry.step, entry.at_ns, {**entry.numbers, **late}) if late else entry


def _alone(rank: int, value: float) -> Spread:
    tally = NumberTally()
    tally.add(rank, value)
    return tally.spread()
