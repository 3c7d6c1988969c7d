"""Recognises range tests: a learning rate that is raised until the loss breaks, on purpose, to learn how high it may be.

    1e-7, 1.26e-7, 1.58e-7, ... 0.8                 by the same factor at every step, or every few, over three decades
    1e-7, 0.011, 0.022, ... 0.8                     by equal steps, the first of which multiplies it by more than a hundred

A warm-up by equal steps starts at about one of these steps, so its first step multiplies the rate far less.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import msgspec

from holter.faults.shared.robust import Points, finite
from holter.faults.window import Window
from holter.records import Evidence, Finding

DECADES, MIN_RATES = 3, 10
FIRST_FACTOR = 100.0
"""Factor by which the first of equal steps must raise the rate."""
ALIKE = 0.05
"""Relative difference up to which two rises count as the same."""
FOLLOWING = 10
"""Number of steps after the test in which its effects still show: weights are put back and the first losses come."""


class RangeTest(NamedTuple):
    """The first step, the last step, and the rates of a range test."""

    first_step: int
    last_step: int
    low: float
    high: float

    def evidence(self) -> Evidence:
        """Return the schedule as evidence."""
        return Evidence(
            kind="schedule",
            summary=f"the learning rate rose from {self.low:.3g} to {self.high:.3g} by the same amount at every step from {self.first_step} to "
            f"{self.last_step}: a range test, which goes on until the loss breaks",
            values={"first_step": self.first_step, "last_step": self.last_step, "low": self.low, "high": self.high},
        )


def range_test(window: Window) -> RangeTest | None:
    """Return the newest range test, which may still be running; None if there is none."""
    known = [(step, rate) for step, rate in finite(window.values("learning_rate")) if rate > 0]
    # Each rate may be held for several steps.
    rates = known[:1] + [later for earlier, later in pairwise(known) if later[1] != earlier[1]]
    by_factor = _longest(rates, lambda one, two: math.log(two / one))
    by_steps = _longest(rates, lambda one, two: two - one, FIRST_FACTOR)
    return max((found for found in (by_factor, by_steps) if found), key=lambda one: one.last_step, default=None)


def _longest(rates: Points, rise: Callable[[float, float], float], first_factor: float = 1.0) -> RangeTest | None:
    """Return the newest run of rates with equal rises from one to the next."""
    found, begin, usual = None, 0, 0.0
    for place, ((step, one), (after, two)) in enumerate(pairwise(rates)):
        now = rise(one, two) / (after - step)
        if not abs(now - usual) <= ALIKE * usual:
            begin, usual = place, now
        (first_step, low), second = rates[begin], rates[begin + 1][1]
        is_long = place + 2 - begin >= MIN_RATES and two >= 10**DECADES * low
        if usual > 0 and is_long and second >= first_factor * low:
            found = RangeTest(first_step, after, low, two)
    return found


def apart_from_tests(window: Window, judge: Callable[[Window], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield a detector's findings, those caused by a range test as information only.

    What came after the test is judged by itself.
    """
    found = list(judge(window))
    test = range_test(window) if found else None
    if test is None:
        yield from found
        return
    until = test.last_step + FOLLOWING
    if all(test.first_step <= one.first_step <= until for one in found):
        later = replace(window, series=tuple(entry for entry in window.series if entry.step > until))
        found = list(judge(later)) or [_remark(one, test) for one in found]
    yield from found


def _remark(found: Finding, test: RangeTest) -> Finding:
    return msgspec.structs.replace(
        found,
        severity="info",
        summary=f"{found.summary.removesuffix('.')}, in a range test of the learning rate.",
        evidence=(*found.evidence, test.evidence()),
    )
