"""The remembered steps across all ranks, whether the ranks agreed since the start, and the numbers of each step. Pure.

A healthy record costs a few dictionary operations, whatever the number of tensors; a view is made when somebody looks,
and kept until its step changes. Numbers are kept as their spread over the ranks, far longer than the steps themselves:

    rank 0 step 40  loss 1.5      step 40  loss  mean 1.6, low 1.5 on rank 0, high 1.7 on rank 1
    rank 1 step 40  loss 1.7

The ranks' own numbers are kept while the step may still change, twelve bytes each, and their spread is computed when
somebody looks. Sums are rounded once, so that the result does not depend on the order of arrival. Steps of a host's
ranks that come in one record are taken in column by column.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import compress, islice

from holter.faults.window import OWN_START, ClassHistory, Spread, StepNumbers, StepView, class_along, is_own
from holter.records import Nonfinite, StepDone, StepsDone
from holter.records.joined import RootColumn, full, root_name

MAX_CLASSES = 32
"""Largest number of tensor classes accepted of one record, not counting a rank's own: eight, along each of four
axes."""
_PLACES = {"input": 0, "loss": 1, "gradient": 2, "reduced_gradient": 3}
Agreement = tuple[str, bool]
"""(tensor class, whether all ranks are equal)."""


MAX_NUMBERED = 4096
"""Largest number of steps whose numbers are remembered."""
MAX_NAMES = 64
"""Largest number of numbers accepted of one record."""
MAX_NAMES_OF_STEP = 512
"""Largest number of different names kept of one step."""
MAX_OPEN = 2048
"""Largest number of steps that may still change; more than the assembly holds, so only logs of steps that never come
are dropped."""
OWN = ("loss", "gradient_norm", "learning_rate", "micro_steps", "seconds")
"""Fields of StepDone. What a script logs under such a name is found under `log.<name>`."""


@dataclass
class StepLedger:
    """What the ranks reported of one step."""

    step: int
    first_seen_ns: int
    reported: set[int] = field(default_factory=set)
    roots: dict[str, dict[int, set[int]]] = field(default_factory=dict)
    nonfinite: dict[int, tuple[Nonfinite, ...]] = field(default_factory=dict)
    broke: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    batches: dict[int, int | set[int]] = field(default_factory=dict)
    """For each signature of a batch, the one rank that was fed it, or all of them; healthy ranks have one each."""
    _view: StepView | None = None
    _verdicts: dict[bool, list[Agreement]] = field(default_factory=dict)
    """Verdicts for a complete and for an incomplete step; kept because a mesh has as many roots as subgroups."""

    def add(self, rank: int, done: StepDone, received_ns: int, *, tensor_limit: int) -> None:
        """Take in one rank's record; a second one of the same rank replaces the first."""
        self._view = None
        self.first_seen_ns = min(self.first_seen_ns, received_ns)
        if rank in self.reported:
            self._forget(rank)
        self.reported.add(rank)
        self._verdicts.clear()
        compared = [(name, root) for name, root in done.roots.items() if self._is_kept(name)]
        for name, root in compared[:MAX_CLASSES]:
            self.roots.setdefault(name, {}).setdefault(root, set()).add(rank)
        if done.nonfinite:
            earliest = sorted(done.nonfinite, key=lambda tensor: (_PLACES[tensor.where], tensor.order))
            self.nonfinite[rank] = tuple(earliest[:tensor_limit])
        if done.batch:
            self._add_batch(done.batch, rank)

    def add_joined(self, joined: StepsDone, received_ns: int) -> None:
        """Take in the joined records of ranks that have not reported yet."""
        self._view = None
        self.first_seen_ns = min(self.first_seen_ns, received_ns)
        ranks = joined.ranks
        self.reported.update(ranks)
        self._verdicts.clear()
        for root in joined.roots[:MAX_CLASSES]:
            if self._is_kept(root.name):
                self._add_roots(root, ranks)
        batches = self.batches
        for rank, signature in zip(ranks, full(joined.batch, len(ranks)), strict=True):
            if signature and batches.setdefault(signature, rank) != rank:
                self._add_batch(signature, rank)

    def _is_kept(self, name: str) -> bool:
        """Whether a class is kept: compared ones are, and the start of a rank's own part, which no other rank should share."""
        return not is_own(name) or (self.step == 0 and name == OWN_START)

    def _add_roots(self, root: RootColumn, ranks: Sequence[int]) -> None:
        """Take in one class.

        Usually all ranks of a host are in one subgroup and equal, or each is in another one.
        """
        if len(root.subgroups) == 1:
            groups = self.roots.setdefault(root_name(root.name, root.subgroups[0]), {})
            if len(root.values) == 1:
                groups.setdefault(root.values[0], set()).update(ranks)
                return
            named = [groups] * len(ranks)
        else:
            named = [self.roots.setdefault(root_name(root.name, subgroup), {}) for subgroup in root.subgroups]
        for rank, groups, value in zip(ranks, named, full(root.values, len(ranks)), strict=True):
            known = groups.get(value)
            if known is None:
                groups[value] = {rank}
            else:
                known.add(rank)

    def verdicts(self, *, is_complete: bool) -> list[Agreement]:
        """Return the verdict on each class: a difference is certain at once, agreement only when no more ranks will report.

        Along an axis a class is equal if it is equal in every subgroup.
        """
        if is_complete not in self._verdicts:
            found: dict[str, bool] = {}
            for name, groups in self.roots.items():
                if is_own(name):
                    continue
                along = class_along(name)
                if len(groups) > 1:
                    found[along] = False
                elif is_complete and any(len(ranks) > 1 for ranks in groups.values()):
                    found.setdefault(along, True)
            self._verdicts[is_complete] = sorted(found.items())
        return self._verdicts[is_complete]

    def view(self, missing: tuple[int, ...]) -> StepView:
        """Return a frozen view; the same object as long as nothing changed."""
        if self._view is None or self._view.missing != missing:
            self._view = StepView(
                step=self.step,
                first_seen_ns=self.first_seen_ns,
                num_reported=len(self.reported),
                missing=missing,
                roots={
                    name: {root: tuple(sorted(ranks)) for root, ranks in sorted(groups.items())}
                    for name, groups in sorted(self.roots.items())
                },
                nonfinite=tuple((rank, tensor) for rank, found in sorted(self.nonfinite.items()) for tensor in found),
                broke_history=tuple(sorted(self.broke)),
                kept_history=tuple(sorted(self.kept)),
                batches={
                    signature: (ranks,) if isinstance(ranks, int) else tuple(sorted(ranks))
                    for signature, ranks in sorted(self.batches.items())
                },
            )
        return self._view

    def _add_batch(self, signature: int, rank: int) -> None:
        known = self.batches.setdefault(signature, rank)
        if isinstance(known, set):
            known.add(rank)
        elif known != rank:
            self.batches[signature] = {known, rank}

    def _forget(self, rank: int) -> None:
        self._verdicts.clear()
        for name, groups in list(self.roots.items()):
            for root in [root for root, ranks in groups.items() if ranks == {rank}]:
                del groups[root]
            for ranks in groups.values():
                ranks.discard(rank)
            if not groups:
                del self.roots[name]
        self.nonfinite.pop(rank, None)
        self.broke.discard(rank)
        self.kept.discard(rank)
        for signature, known in list(self.batches.items()):
            others = ({known} if isinstance(known, int) else known) - {rank}
            if not others:
                del self.batches[signature]
            elif isinstance(known, set):
                self.batches[signature] = others


def extend_histories(histories: dict[str, ClassHistory], step: int, verdicts: Iterable[Agreement]) -> None:
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
        histories[name] = _history_after(known, step, is_equal=is_equal)


def _history_after(known: ClassHistory, step: int, *, is_equal: bool) -> ClassHistory:
    has_differed = known.first_unequal_step is not None
    if is_equal:
        last_equal = known.last_equal_step if has_differed else step
        return replace(known, last_equal_step=last_equal, num_equal=known.num_equal + 1)
    first_unequal = known.first_unequal_step if has_differed else step
    return replace(known, first_unequal_step=first_unequal, num_unequal=known.num_unequal + 1)


class NumberTally:
    """One number from all ranks."""

    __slots__ = ("_ranks", "_values")

    def __init__(self) -> None:
        self._ranks = array("i")
        self._values = array("d")

    def add(self, rank: int, value: float) -> None:
        """Add one rank's value."""
        self._ranks.append(rank)
        self._values.append(value)

    def add_column(self, ranks: Sequence[int], values: Sequence[float]) -> None:
        """Add a value for each of these ranks, or one for all."""
        self._ranks.extend(ranks)
        self._values.extend(values if len(values) == len(ranks) else [values[0]] * len(ranks))

    def spread(self) -> Spread:
        """Return the spread as of now; NaN and rank -1 if no value was finite. Of equal extremes the lowest rank is named."""
        ranks, values, num = self._ranks, self._values, len(self._values)
        total = _total(values)
        if not math.isfinite(total):
            finite = list(map(math.isfinite, values))
            ranks, values = array("i", compress(ranks, finite)), array("d", compress(values, finite))
            total = _total(values)
        if not values:
            return Spread(math.nan, math.nan, math.nan, -1, -1, num, num)
        mean = total / len(values) if math.isfinite(total) else float(sum(map(Fraction, values)) / len(values))
        low, high = min(values), max(values)
        low_rank, high_rank = _first_rank(ranks, values, low), _first_rank(ranks, values, high)
        # Zeros have signs, and which of them comes first is random.
        return Spread(mean, low + 0.0, high + 0.0, low_rank, high_rank, num, num - len(values))


def _total(values: Iterable[float]) -> float:
    """Return the sum, rounded once; NaN if it cannot be computed."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def _first_rank(ranks: "array[int]", values: "array[float]", value: float) -> int:
    if values.count(value) == 1:
        return ranks[values.index(value)]
    return min(rank for rank, known in zip(ranks, values, strict=True) if known == value)


class _OpenNumbers:
    """The numbers of a step that may still change."""

    def __init__(self) -> None:
        self.tallies: dict[str, NumberTally] = {}
        self.logged: dict[str, dict[int, float]] = {}
        self.entry: StepNumbers | None = None

    def tally(self, name: str) -> NumberTally | None:
        """Return the tally of a name; None if there are too many names."""
        found = self.tallies.get(name)
        if found is None and len(self.tallies) < MAX_NAMES_OF_STEP:
            found = self.tallies[name] = NumberTally()
        return found

    def spreads(self) -> dict[str, Spread]:
        found = {name: tally.spread() for name, tally in self.tallies.items()}
        found |= {name: _spread(values) for name, values in self.logged.items()}
        return dict(sorted(found.items()))


class NumberBook:
    """The numbers of all steps that are remembered."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenNumbers] = {}
        self._kept: dict[int, StepNumbers] = {}

    def add(self, step: int, rank: int, done: StepDone) -> None:
        """Add a rank's first record of a step; the caller passes no second one."""
        known = self._at(step)
        known.entry = None
        for name, value in _numbers(done):
            tally = known.tally(name)
            if tally is not None:
                tally.add(rank, value)

    def add_joined(self, step: int, joined: StepsDone) -> None:
        """Add the first records of several ranks."""
        known = self._at(step)
        known.entry = None
        for name, values in _columns(joined):
            tally = known.tally(name)
            if tally is not None:
                tally.add_column(joined.ranks, values)

    def log(self, step: int, rank: int, values: Mapping[str, float]) -> None:
        """Add what the script of one rank logged; the last value of a name counts."""
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
        """Return the numbers of one step; the same object as long as nothing changed."""
        known = self._at(step)
        if known.entry is None or known.entry.at_ns != at_ns:
            known.entry = StepNumbers(step, at_ns, known.spreads())
        return known.entry

    def keep(self, step: int, at_ns: int) -> None:
        """Keep this step, which is complete and leaves the assembly together with everything before it."""
        self._kept[step] = self.entry(step, at_ns)
        self.forget_until(step)
        while len(self._kept) > MAX_NUMBERED:
            del self._kept[next(iter(self._kept))]

    def forget_until(self, step: int) -> None:
        """Drop what is open of this step and those before it, because they no longer change."""
        for old in [known for known in self._open if known <= step]:
            del self._open[old]

    def take_back(self, step: int) -> None:
        """Discard what was reported of this step and later ones, because ranks have started again."""
        # Thousands of ranks start again together: only the first of them finds anything.
        if max(self._open, default=-1) < step and next(reversed(self._kept), -1) < step:
            return
        self._open = {known: value for known, value in self._open.items() if known < step}
        self._kept = {known: value for known, value in self._kept.items() if known < step}

    def remembered(self) -> tuple[StepNumbers, ...]:
        """Return the steps that have left the assembly, ascending."""
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


def _columns(joined: StepsDone) -> Iterator[tuple[str, Sequence[float]]]:
    """Yield the numbers of several ranks, column by column."""
    for name in OWN:
        values = getattr(joined, name)
        if values is not None:
            yield name, [float(values)] if isinstance(values, int) else values
    for name, values in islice(joined.numbers.items(), MAX_NAMES):
        if name not in OWN:
            yield name, values


def _joined(entry: StepNumbers, rank: int, said: Mapping[str, float]) -> StepNumbers:
    """Add late values to a step that has left the assembly: a new name is added, further values of a known one come too late."""
    late = {name: _spread({rank: value}) for name, value in said.items() if name not in entry.numbers}
    return StepNumbers(entry.step, entry.at_ns, {**entry.numbers, **late}) if late else entry


def _spread(values: Mapping[int, float]) -> Spread:
    tally = NumberTally()
    for rank, value in values.items():
        tally.add(rank, value)
    return tally.spread()
