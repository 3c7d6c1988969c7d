"""Programs repeat from step to step: a rank's next call is the one that followed when it last had just made the same calls.

called so far   A B C  A B C  A B      the longest tail that was there before: A B C A B, and then came C
seen            ... A B   A B C A      C is missing: from there on it is the program, one further
seen            ... A B X C A B C      X is extra
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeVar

MIN_CONTEXT = 3
"""A tail shorter than this is no history."""
MAX_SHIFT = 64
"""Calls that may be missing, or too many, in one place."""

MAX_ROUNDS = 8
"""Repetitions over which the pauses between calls are looked at."""

T = TypeVar("T", bound=Hashable)

Shift = Literal["missing", "swapped", "extra", "other"]


@dataclass(frozen=True)
class Pattern:
    """How a sequence goes on if it goes on as before."""

    period: int
    context: int
    """Length of the tail that was there before, one period earlier."""

    def extended(self, history: Sequence[T], num: int) -> list[T]:
        """The history's continuation."""
        items = list(history)
        for _ in range(num):
            items.append(items[-self.period])
        return items[len(history) :]


def pattern(history: Sequence[Hashable]) -> Pattern | None:
    """The longest tail of a history that occurs in it before, a whole period at least.

    None where a tail as long, or a longer one that is no whole period, was followed by something else: an evaluation now and then.
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
    """For every shift from 1 on: how many items from the first on equal those that many further (the Z function)."""
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
    """Whether the call that comes so many after the next one is surely not the first of its step.

    The longest pause is before a step's first call: data, the forward pass, and the first part of the backward pass. `times_ns`: when the
    calls up to the next one were made.
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
    """How a rank's calls from its first deviation on compare with what was to be called."""

    shift: Shift
    by: int
    """Calls that are missing, extra or changed."""
    evidence: int
    """Calls that agree under this explanation."""


def align(seen: Sequence[int], expected: Sequence[int], *, is_similar: bool = False) -> Alignment:
    """The explanation with the fewest changes, and of those the one that most calls agree with. `seen[0]` differs from `expected[0]`.

    `is_similar`: the two are the same operation with other sizes or dtypes, so that one is likely to stand for the other.
    """
    agreeing = _agreeing(seen[1:], expected[1:])
    other = Alignment("other", 1, agreeing or 0)
    # One call alone that the program knows well, only later: the rank has gone ahead.
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
    """How many calls two sequences have in common from their beginnings; None if they differ before the shorter one ends."""
    num = min(len(one), len(other))
    return num if list(one[:num]) == list(other[:num]) else None
