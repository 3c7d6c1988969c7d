"""Input shift: the inputs are no longer what they were.

What it detects
    A tensor of the batch whose mean, spread or largest magnitude has left what it was in this run, by many times its own usual fluctuation,
    and stays there: on one rank while the others are as before, or on all.

Why it matters
    Another source, another normalisation, another vocabulary: the model is trained on something else than before, and a rank that alone
    reads it pulls the others along.

False positives
    Only a history that is steady itself is compared with: a curriculum that grows, sequences that get longer, data in the order of its
    making are not judged. Spikes that recover do not stay. Masks, positions and lengths may change at will. A change on all ranks at one
    step is what a curriculum or a second stage does on purpose: that is information.

What to do
    Look at the batches of the named rank before and after the named step (`holter explain distribution_shift`).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from holter.faults.data.batch_values import EXEMPT
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import ranks_text
from holter.faults.window import Spread, Window
from holter.records import Evidence, Finding

STATS = {"mean": "mean", "spread": "standard deviation", "absmax": "largest magnitude"}
MAX_POINTS = 256
BLOCKS = 4
Points = Sequence[tuple[int, Spread]]


@dataclass(frozen=True)
class _Shift:
    leaf: str
    stat: str
    step: int
    rank: int | None
    """The only rank with the shift; None if all ranks have it."""
    before: float
    after: float
    times: float
    """Size of the shift in usual fluctuations."""
    num_before: int
    num_after: int


@dataclass(frozen=True)
class InputShift:
    """Compares statistics of batches with the run's own past."""

    name: ClassVar[str] = "input_shift"

    fluctuations: float = threshold(8.0, above=3)
    """Usual fluctuations that a number must be away."""
    min_change: float = threshold(0.2, above=0)
    """Share of its size by which it must also be away; for a mean, share of the elements' spread."""
    min_before: int = threshold(12, at_least=8)
    """Number of checks before."""
    min_run: int = threshold(6, at_least=4)
    """Number of checks in a row since."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the shift that began first."""
        shifts = [shift for leaf in _leaves(window) for shift in self._of_leaf(window, leaf)]
        if shifts:
            first = min(shifts, key=lambda one: (one.step, one.rank is None, -one.times))
            alike = [one for one in shifts if abs(one.step - first.step) < self.min_run and one.rank == first.rank]
            yield _finding(window, first, alike)

    def _of_leaf(self, window: Window, leaf: str) -> Iterator[_Shift]:
        spreads = dict(window.values(f"batch.{leaf}.spread"))
        for stat in STATS:
            points = [
                (step, one)
                for step, one in window.values(f"batch.{leaf}.{stat}")[-MAX_POINTS:]
                if math.isfinite(one.low) and math.isfinite(one.high)
            ]
            if len(points) < self.min_before + self.min_run:
                continue
            sizes = [spreads[step].mean for step, _ in points[: self.min_before] if step in spreads]
            found = self._shifted(points, median(sizes) if stat == "mean" and sizes else 0.0)
            if found is not None:
                cut, is_up, past = found
                yield _shift((leaf, stat), points, cut, past, is_up=is_up)

    def _shifted(self, points: Points, size: float) -> tuple[int, bool, "_Past"] | None:
        """Return where the newest points begin that all lie far on one side of all earlier ones.

        They are compared first with the oldest points, then with all earlier ones.
        """
        for is_up in (True, False):
            past = _Past.of(points[: self.min_before])
            cut = len(points)
            while cut > self.min_before and self._is_beyond(points[cut - 1][1], past, size, is_up=is_up):
                cut -= 1
            if len(points) - cut < self.min_run:
                continue
            past = _Past.of(points[:cut])
            is_far = all(self._is_beyond(one, past, size, is_up=is_up) for _, one in points[cut:])
            if is_far and past.is_steady:
                return cut, is_up, past
        return None

    def _is_beyond(self, one: Spread, past: "_Past", size: float, *, is_up: bool) -> bool:
        """Whether some rank's number is beyond; a shift may be one rank's alone."""
        least = max(self.fluctuations * past.usual, self.min_change * (size or abs(past.middle)))
        away = one.high - past.middle if is_up else past.middle - one.low
        return least > 0 and away > least


@dataclass(frozen=True)
class _Past:
    """What a number used to be, on all ranks."""

    middle: float
    usual: float
    """Its usual fluctuation."""
    is_steady: bool

    @classmethod
    def of(cls, points: Points) -> "_Past":
        values = [value for _, one in points for value in (one.low, one.high)]
        usual = _fluctuation(values)
        return cls(median(values), usual, _is_steady([(one.low + one.high) / 2 for _, one in points], usual))


def _shift(number: tuple[str, str], points: Points, cut: int, past: _Past, *, is_up: bool) -> _Shift:
    """Describe the shift, as one rank's if the others stayed where all had been."""
    (leaf, stat), after = number, points[cut:]
    far = [one.high if is_up else one.low for _, one in after]
    near = [one.low if is_up else one.high for _, one in after]
    ranks = {one.high_rank if is_up else one.low_rank for _, one in after}
    gone = median(far) - past.middle
    others = [
        (one.mean * one.num - own) / (one.num - 1) for (_, one), own in zip(after, far, strict=True) if one.num > 1
    ]
    is_alone = (
        len(ranks) == 1
        and len(others) == len(after)
        and abs(median(others) - past.middle) < abs(gone) / 4
        and abs(median(near) - past.middle) < abs(gone) / 2
    )
    times = abs(gone) / past.usual if past.usual else math.inf
    rank = next(iter(ranks)) if is_alone else None
    return _Shift(leaf, stat, after[0][0], rank, past.middle, median(far), times, cut, len(after))


def _fluctuation(values: Sequence[float]) -> float:
    """Return a robust standard deviation, at least a sixth of the whole range, because rare values are usual too."""
    middle = median(values)
    spread = 1.4826 * median(abs(value - middle) for value in values)
    return max(spread, (max(values) - min(values)) / 6)


def _is_steady(values: Sequence[float], usual: float) -> bool:
    """Whether the history has no trend: its parts do not differ by more than their fluctuation allows."""
    length = len(values) // BLOCKS
    means = [sum(values[at * length : (at + 1) * length]) / length for at in range(BLOCKS)]
    return max(means) - min(means) <= 3 * usual * (2 / length) ** 0.5 or max(values) == min(values)


def _leaves(window: Window) -> list[str]:
    names = set[str]().union(*(entry.numbers for entry in window.series[-MAX_POINTS:]))
    found = (re.fullmatch(r"batch\.(.+)\.spread", name) for name in names)
    return sorted(one[1] for one in found if one and not EXEMPT.search(one[1].lower()))


def _finding(window: Window, first: _Shift, alike: Sequence[_Shift]) -> Finding:
    ranks = tuple(sorted(window.attached)) if first.rank is None else (first.rank,)
    is_alone = first.rank is not None and window.world_size > 1
    return Finding(
        detector=InputShift.name,
        severity="warning" if is_alone else "info",
        first_step=first.step,
        detected_step=max((entry.step for entry in window.series), default=first.step),
        ranks=ranks,
        tensors=(first.leaf,),
        summary=f"{first.leaf} in the batches of {ranks_text(ranks)} is not what it was since step {first.step}: its {STATS[first.stat]} went from {first.before:.3g} to {first.after:.3g}.",
        facts={
            "has_shifted": True,
            "is_on_one_rank": is_alone,
            "is_on_all_ranks": not is_alone,
            "has_returned": False,
            "series": [f"batch.{one.leaf}.{one.stat}" for one in alike],
        },
        evidence=tuple(
            Evidence(
                kind="batch",
                summary=f"{ranks_text(ranks)}: {STATS[one.stat]} of {one.leaf} was {one.before:.3g} at {one.num_before} checks and is {one.after:.3g} at {one.num_after} since "
                f"step {one.step}"
                + (f", {one.times:.3g} times its usual fluctuation away" if math.isfinite(one.times) else ""),
                values={"leaf": one.leaf, "before": one.before, "after": one.after, "step": one.step},
            )
            for one in alike
        ),
    )
