"""Gradient balance: one module's gradient came to outweigh the others' a hundred times, and it was not so before.

What it detects
    A module whose gradient norm, at each of the last five checks, is over a hundred times the middle one of its peers, ten times as far
    from it as at the beginning of the run, and ten times its own norm at that time; or the reverse: a module that fell to a hundredth of
    its own norm and of its peers'.

Why it matters
    One module's gradients then decide the clip factor and the direction of a step for all: the others stop learning.

False positives
    Modules that always differed (embeddings, heads, normalisation) are measured against their own beginning. Norms that all shrink
    together, adapters that start at zero, and modules unfrozen later, which have no beginning to compare with, are silent. What a
    range test of the learning rate does is information.

What to do
    See what feeds the named module: a loss term, a scale, a batch statistic that ran away.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, NamedTuple

from holter.faults.numerics.gradient_vanishing import Norms, gradient_norms
from holter.faults.shared.range_test import apart_from_tests
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed
from holter.faults.window import Window
from holter.records import Evidence, Finding

MAX_SHOWN = 5


class ShareShift(NamedTuple):
    """One module's share, before and now."""

    module: str
    first_step: int
    before: float
    now: float
    ratio_before: float
    """Ratio of its norm to the median norm of its peers."""
    ratio: float


@dataclass(frozen=True)
class GradientBalance:
    """Compares each module's share of the gradient with its own beginning."""

    name: ClassVar[str] = "gradient_balance"

    ratio: float = threshold(100.0, above=1)
    """One module's norm must be this many times the median norm of its peers, or the reverse."""
    growth: float = threshold(10.0, above=1)
    """That ratio must have grown by at least this factor since the beginning."""
    min_checks: int = threshold(5, at_least=1)
    """Number of checks in a row until now, and of at least twice as many before."""
    skip_checks: int = 2
    """Number of first checks that are left out, because much still settles then."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding, with all such modules."""
        yield from apart_from_tests(window, self._judged)

    def _judged(self, window: Window) -> Iterator[Finding]:
        checks = list(gradient_norms(window).items())[self.skip_checks :]
        if len(checks) < 3 * self.min_checks:
            return
        base = [norms for _, norms in checks[: 2 * self.min_checks]]
        names = [name for name in checks[-1][1] if all(name in norms for norms in base)]
        if len(names) < 3:  # noqa: PLR2004 - two modules have no middle
            return
        usual = {name: median(norms[name] for norms in base) for name in names}
        shifts = [shift for name in names if (shift := self._shift(name, usual, checks[2 * self.min_checks :]))]
        if shifts:
            yield _finding(window, shifts, checks[-1][0])

    def _shift(self, name: str, usual: Norms, later: list[tuple[int, Norms]]) -> ShareShift | None:
        middle = median(usual.values())
        if not usual[name] or not middle:
            return None
        before, first, num = usual[name] / middle, -1, 0
        for step, norms in reversed(later):
            known = [norms[other] for other in usual if other in norms]
            if name not in norms or not self._is_off(norms[name], median(known), usual[name], middle):
                break
            first, num = step, num + 1
        if num < self.min_checks:
            return None
        last = later[-1][1]
        ratio = last[name] / median(last[other] for other in usual if other in last)
        return ShareShift(name, first, usual[name], last[name], before, ratio)

    def _is_off(self, norm: float, middle: float, own_before: float, middle_before: float) -> bool:
        if not middle or not norm:
            return False
        ratio, before = norm / middle, own_before / middle_before
        is_above = ratio > max(self.ratio, self.growth * before) and norm > self.growth * own_before
        is_below = ratio < min(1 / self.ratio, before / self.growth) and norm * self.ratio < own_before
        # If the median fell as well, the run is settling.
        return is_above or (is_below and middle * 3 > middle_before)


def _finding(window: Window, shifts: list[ShareShift], last: int) -> Finding:
    shifts = sorted(shifts, key=lambda shift: -abs(math.log(shift.ratio)))
    lead, first = shifts[0], min(shift.first_step for shift in shifts)
    is_above = lead.ratio > 1
    side = f"{lead.ratio:.3g} times" if is_above else f"one {1 / lead.ratio:.3g}th of"
    shown = listed(
        f"{s.module} {s.before:.2g} then and {s.now:.2g} now ({s.ratio_before:.2g} and {s.ratio:.2g} of the middle one)"
        for s in shifts[:MAX_SHOWN]
    )
    return Finding(
        detector=GradientBalance.name,
        severity="warning",
        first_step=first,
        detected_step=last,
        ranks=tuple(sorted(window.attached)),
        modules=tuple(shift.module for shift in shifts),
        summary=f"The gradient of {lead.module} is {side} its peers' since step {first}; in the beginning it was {lead.ratio_before:.2g} times.",
        facts={
            "is_above": is_above,
            "is_single": len(shifts) == 1,
            "was_so_before": False,
            "series": ["gradient_norm", "loss"],
        },
        evidence=(
            Evidence(
                kind="modules",
                summary=f"gradient norms: {shown}",
                values={"modules": {s.module: [s.before, s.now] for s in shifts[:MAX_SHOWN]}, "step": last},
            ),
        ),
    )
