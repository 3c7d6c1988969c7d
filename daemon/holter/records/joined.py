"""One step of several ranks of a host in one record, column by column; nothing is lost by it.

    rank 0  loss 1.5  seconds 0.9  roots gradients@replicate#0: 17        ranks [0, 1]  loss [1.5, 1.7]  seconds [0.9]
    rank 1  loss 1.7  seconds 0.9  roots gradients@replicate#1: 23   ->   roots gradients@replicate, subgroups [0, 1], values [17, 23]

A column with one value holds it for all ranks. Ranks are joined if they say the same kinds of things in the same order, and nothing that is
not finite: what is urgent travels as it is. `apart` gives back what was joined, to the bit.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from holter.records.rank import StepDone, View

T = TypeVar("T", int, float)
V = TypeVar("V")

NO_SUBGROUP = -1
MAX_DIGITS = 9
Told = tuple[int, int, StepDone]
"""A rank, the wall-clock nanoseconds at which it measured the step, and the step."""


class RootColumn(msgspec.Struct, frozen=True, array_like=True):
    """The root fingerprints of one class of tensors, one for each rank."""

    name: str
    """Name of the class, without the subgroup's number."""
    subgroups: list[int]
    """Number after `#` in the name, for each rank; -1 if the name has none."""
    values: list[int]


class StepsDone(msgspec.Struct, frozen=True, tag="steps", kw_only=True):
    """The `StepDone` of one step from several ranks. Fields that are no column have the same value on all of them."""

    ranks: list[int]
    at_ns: list[int]
    seconds: list[float]
    phase_seconds: dict[str, list[float]]
    micro_steps: int
    loss: list[float] | None
    gradient_norm: list[float] | None
    learning_rate: list[float] | None
    batch: list[int]
    roots: list[RootColumn]
    overhead_ratio: list[float]
    check_interval: int
    view: View
    numbers: dict[str, list[float]]

    @property
    def is_sound(self) -> bool:
        """Whether each column has one value or one for each rank, and no rank comes twice."""
        lengths = (1, len(self.ranks))
        columns: list[Sequence[float]] = [self.at_ns, self.seconds, self.batch, self.overhead_ratio]
        columns += [column for column in (self.loss, self.gradient_norm, self.learning_rate) if column is not None]
        columns += [*self.phase_seconds.values(), *self.numbers.values()]
        columns += [part for root in self.roots for part in (root.subgroups, root.values)]
        return bool(self.ranks) and len(set(self.ranks)) == lengths[1] and all(len(one) in lengths for one in columns)


def column(values: Sequence[T]) -> list[T]:
    """Return the values as a column: a single value if all are the same to the bit, else one for each rank."""
    first = values[0]
    is_same = all(value == first for value in values) and (
        first != 0 or all(math.copysign(1, value) == math.copysign(1, first) for value in values)
    )
    return [first] if is_same else list(values)


def at(values: Sequence[V], index: int) -> V:
    """Return the value of the rank at this index of a column."""
    return values[index] if len(values) > 1 else values[0]


def full(values: list[V], num: int) -> list[V]:
    """Expand a column to one value for each of `num` ranks."""
    return values if len(values) == num else values * num


def kind(done: StepDone) -> Hashable | None:
    """Return a key that is equal for steps that can be joined; None if this step must travel by itself."""
    if done.nonfinite:
        return None
    is_none = (done.loss is None, done.gradient_norm is None, done.learning_rate is None)
    names = (tuple(split(name)[0] for name in done.roots), tuple(done.phase_seconds), tuple(done.numbers))
    return done.micro_steps, done.check_interval, done.view, is_none, names


def join(parts: Sequence[Told]) -> StepsDone:
    """Join the steps of several ranks, which must all have the same `kind`."""
    steps = [done for _, _, done in parts]
    first = steps[0]
    return StepsDone(
        ranks=[rank for rank, _, _ in parts],
        at_ns=column([at_ns for _, at_ns, _ in parts]),
        seconds=column([done.seconds for done in steps]),
        phase_seconds={name: column([done.phase_seconds[name] for done in steps]) for name in first.phase_seconds},
        micro_steps=first.micro_steps,
        loss=_told([done.loss for done in steps]),
        gradient_norm=_told([done.gradient_norm for done in steps]),
        learning_rate=_told([done.learning_rate for done in steps]),
        batch=column([done.batch for done in steps]),
        roots=_roots(steps),
        overhead_ratio=column([done.overhead_ratio for done in steps]),
        check_interval=first.check_interval,
        view=first.view,
        numbers={name: column([done.numbers[name] for done in steps]) for name in first.numbers},
    )


def apart(joined: StepsDone) -> Iterator[Told]:
    """Yield each rank's own step again, undoing `join`."""
    for index, rank in enumerate(joined.ranks):
        done = StepDone(
            seconds=at(joined.seconds, index),
            phase_seconds={name: at(values, index) for name, values in joined.phase_seconds.items()},
            micro_steps=joined.micro_steps,
            loss=_at(joined.loss, index),
            gradient_norm=_at(joined.gradient_norm, index),
            learning_rate=_at(joined.learning_rate, index),
            batch=at(joined.batch, index),
            roots={root_name(root.name, at(root.subgroups, index)): at(root.values, index) for root in joined.roots},
            nonfinite=[],
            overhead_ratio=at(joined.overhead_ratio, index),
            check_interval=joined.check_interval,
            view=joined.view,
            numbers={name: at(values, index) for name, values in joined.numbers.items()},
        )
        yield rank, at(joined.at_ns, index), done


def split(name: str) -> tuple[str, int]:
    """Split the name of a root into the class of tensors and the number of the subgroup.

    >>> split("gradients@replicate#3"), split("frozen")
    (('gradients@replicate', 3), ('frozen', -1))
    """
    stem, _, number = name.partition("#")
    # Only a number that `root_name` would write the same way: "#03" belongs to the name.
    is_number = len(number) <= MAX_DIGITS and number.isascii() and number.isdecimal() and number == str(int(number))
    return (stem, int(number)) if is_number else (name, NO_SUBGROUP)


@lru_cache(maxsize=65_536)
def root_name(name: str, subgroup: int) -> str:
    """Return the name of a root as the rank itself reported it.

    Cached: there are as many names as subgroups, and each is asked for at every step.
    """
    return name if subgroup == NO_SUBGROUP else f"{name}#{subgroup}"


def _roots(steps: Sequence[StepDone]) -> list[RootColumn]:
    told = [list(done.roots.items()) for done in steps]
    found = []
    for place, (name, _) in enumerate(told[0]):
        stem = split(name)[0]
        subgroups = column([split(said[place][0])[1] for said in told])
        found.append(RootColumn(stem, subgroups, column([said[place][1] for said in told])))
    return found


def _told(values: Sequence[Any]) -> list[float] | None:
    return None if values[0] is None else column(values)


def _at(values: Sequence[float] | None, index: int) -> float | None:
    return None if values is None else at(values, index)
