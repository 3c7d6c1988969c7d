"""Batch values: labels that stopped varying or left their range, inputs that left their usual magnitude.

What it detects
    A tensor of the batch that varied and is constant since a step, or that is constant on one rank while it varies on the others; whole
    numbers (labels, tokens) that turn negative or pass ten times the largest ever seen; inputs whose largest magnitude is fifty times,
    or a fiftieth of, what it was, or of what the other ranks have. It names rank, tensor and step.

Why it matters
    A broken decoder, a shifted column, a missing normalisation or a dead mount feeds a rank with nonsense that still has the right
    shape. Its gradients are averaged into everyone's, and the loss only gets a little worse.

False positives
    Masks, positions, lengths and weights may be constant or change at will: known by their names, and by their values of 0 and 1. Small
    batches have equal labels by chance: how often that happened before is counted in, and the same few batches over and over prove
    nothing. -1 and -100 mark labels to be ignored. Outliers come and go: only what stays for several checks in a row, and beyond all
    that was seen before, counts. A curriculum that changes its data at one step on all ranks is reported, with less confidence.

What to do
    Look at the named rank's batch of that step (`holter explain corrupt_labels_or_range`).
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import listed, ranks_text
from holter.faults.window import Spread, StepNumbers, Window
from holter.records import Evidence, Finding

OddKind = Literal["constant", "odd_constant", "range", "scale", "odd_scale"]
Check = tuple[int, dict[str, Spread]]
"""(step, what was measured of one tensor of the batch at that step)"""
Spreads = Sequence[tuple[int, Spread]]
"""One number of one tensor over the steps."""

EXEMPT = re.compile(
    r"mask|pos|segment|token_type|len|index|idx|weight|pad|time|step|sigma|scale|task|domain|size|shape|num|bias|^id$"
)
"""Names of tensors that may be constant, or of any magnitude."""
LABELS = re.compile(r"label|target|class")
IGNORED = (-1.0, -100.0)
"""Labels that losses are told to ignore."""
MAX_CHECKS = 128
MAX_STEPS = 1024
"""Number of newest steps in which checks are looked for."""


@dataclass(frozen=True)
class OddTensor:
    """One tensor of the batch that differs from its own past, or from the other ranks'."""

    kind: OddKind
    leaf: str
    first_step: int
    ranks: tuple[int, ...]
    text: str
    number: str
    """Name of the number that a plot should show."""
    is_culprit_known: bool = True


@dataclass(frozen=True)
class BatchValues:
    """Compares the values of batches with their own history and with the other ranks'."""

    name: ClassVar[str] = "batch_values"

    factor: float = threshold(50.0, above=1)
    """An input this many times above its history's or its peers' extreme is off its scale."""
    range_factor: float = 10.0
    """A whole number this many times above the largest ever seen is out of range."""
    chance: float = 1e-3
    """Probability at most that healthy data looks like this, by counting alone."""
    min_run: int = 3
    """Checks in a row that must show it; a tensor that turns constant needs five, and five before, or two if its peers' still vary."""
    min_peers: int = 8
    """Checks in a row that must show it on one rank alone, if it shows from the start."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: the first odd tensor, and the same rank's other odd tensors since the same step."""
        odd_tensors = [
            tensor
            for leaf, checks in _checks(window).items()
            for tensor in self._of_leaf(leaf, checks)
            if tensor and not (tensor.kind == "odd_constant" and self._is_little_data(window, tensor.ranks[0]))
        ]
        if odd_tensors:
            first = min(odd_tensors, key=lambda tensor: (tensor.first_step, tensor.leaf))
            alike = [one for one in odd_tensors if (one.first_step, one.ranks) == (first.first_step, first.ranks)]
            yield _finding(window, first, alike)

    def _is_little_data(self, window: Window, rank: int) -> bool:
        """Whether this rank is fed the same few batches over and over.

        Each of them is only one piece of evidence, however often it comes.
        """
        signatures = {s for view in window.steps for s, ranks in view.batches.items() if rank in ranks}
        return 0 < len(signatures) < self.min_peers

    def _of_leaf(self, leaf: str, checks: Sequence[Check]) -> Iterator[OddTensor | None]:
        is_exempt = bool(EXEMPT.search(leaf.lower())) and not LABELS.search(leaf.lower())
        if is_exempt:
            return
        yield self._constant(leaf, checks)
        yield self._constant_beside_peers(leaf, checks)
        if _is_whole(checks):
            yield self._below_range(leaf, checks)
            yield self._above_range(leaf, checks)
        else:
            yield from self._off_scale(leaf, checks)
            yield self._off_peers(leaf, checks)

    def _constant(self, leaf: str, checks: Sequence[Check]) -> OddTensor | None:
        points = [(step, found["is_constant"]) for step, found in checks if "is_constant" in found]
        run = _run(points, lambda point, newest: point.high == 1 and point.high_rank == newest.high_rank)
        before = points[: len(points) - len(run)]
        is_alone = all(_is_alone(point) for _, point in run)
        if len(run) < max(5, self.min_run) or len(before) < (2 if is_alone else 5) or _is_mask(checks):
            return None
        if _usual_constancy(run, before, is_alone=is_alone) ** len(run) > self.chance / 10:
            return None
        ranks = _ranks(run, "high_rank", is_all=all(point.low == 1 for _, point in run))
        text = f"{leaf} varied at {len(before)} checks before step {run[0][0]} and has been constant at {len(run)} checks since"
        return OddTensor("constant", leaf, run[0][0], ranks, text, f"batch.{leaf}.is_constant")

    def _constant_beside_peers(self, leaf: str, checks: Sequence[Check]) -> OddTensor | None:
        points = [(step, found["is_constant"]) for step, found in checks if "is_constant" in found]
        run = _run(points, lambda point, newest: _is_alone(point) and point.high_rank == newest.high_rank)
        if len(run) < max(self.min_peers, len(points)):
            return None
        text = f"{leaf} was constant at each of {len(run)} checks on this rank, and at none on the other ranks"
        return OddTensor("odd_constant", leaf, run[0][0], (run[0][1].high_rank,), text, f"batch.{leaf}.is_constant")

    def _below_range(self, leaf: str, checks: Sequence[Check]) -> OddTensor | None:
        points = [(step, found["min"]) for step, found in checks]
        run = _run(points, lambda point, _: _is_negative(point.low))
        before = points[: len(points) - len(run)]
        if not self._is_proof(run, before):
            return None
        ranks = _ranks(run, "low_rank", is_all=all(_is_negative(point.high) for _, point in run))
        text = f"{leaf} was never negative (but for labels to be ignored) at {len(before)} checks, and is down to {run[-1][1].low:g} since step {run[0][0]}"
        return OddTensor("range", leaf, run[0][0], ranks, text, f"batch.{leaf}.min")

    def _above_range(self, leaf: str, checks: Sequence[Check]) -> OddTensor | None:
        points = [(step, found["max"]) for step, found in checks]
        return self._jump(leaf, points, "max", self.range_factor, "range")

    def _off_scale(self, leaf: str, checks: Sequence[Check]) -> Iterator[OddTensor | None]:
        points = [(step, found["absmax"]) for step, found in checks]
        yield self._jump(leaf, points, "absmax", self.factor, "scale")
        yield self._drop(leaf, points)

    def _jump(self, leaf: str, points: Spreads, stat: str, factor: float, kind: OddKind) -> OddTensor | None:
        """Find values that have all been above `factor` times the largest of all earlier checks since some step."""
        run, before = _jumped(points, lambda top: factor * max(top, 0.0))
        if not before or not run:
            return None
        top = max(point.high for _, point in before)
        if not self._is_proof(run, before) and not self._is_proof_beside_peers(run, before, factor * top):
            return None
        ranks = _ranks(run, "high_rank", is_all=all(point.low > factor * top for _, point in run))
        text = f"largest {'value' if stat == 'max' else 'magnitude'} of {leaf}: at most {top:.3g} at {len(before)} checks, {run[-1][1].high:.3g} since step {run[0][0]}"
        return OddTensor(kind, leaf, run[0][0], ranks, text, f"batch.{leaf}.{stat}")

    def _drop(self, leaf: str, points: Spreads) -> OddTensor | None:
        """Find magnitudes that have all been below 1/`factor` of the smallest of all earlier checks since some step."""
        turned = [(step, _turned(point)) for step, point in points]
        run, before = _jumped(turned, lambda top: top / self.factor)
        if not self._is_proof(run, before):
            return None
        least = min(-point.high for _, point in before)
        ranks = _ranks(run, "high_rank", is_all=all(-point.low < least / self.factor for _, point in run))
        text = f"largest magnitude of {leaf}: at least {least:.3g} at {len(before)} checks, {-run[-1][1].high:.3g} since step {run[0][0]}"
        return OddTensor("scale", leaf, run[0][0], ranks, text, f"batch.{leaf}.absmax")

    def _off_peers(self, leaf: str, checks: Sequence[Check]) -> OddTensor | None:
        points = [(step, found["absmax"]) for step, found in checks]
        odd = [_odd_rank(point, self.factor) for _, point in points]
        newest = odd[-1]
        if len(points) < self.min_peers or not newest or any(one != newest for one in odd):
            return None
        last = points[-1][1]
        text = f"largest magnitude of {leaf}: {last.high:.3g} on rank {last.high_rank}, {last.low:.3g} on rank {last.low_rank}, alike at {len(points)} checks"
        return OddTensor("odd_scale", leaf, points[0][0], newest, text, f"batch.{leaf}.absmax", len(newest) == 1)

    def _is_proof(self, run: Sequence[object], before: Sequence[object]) -> bool:
        """Whether chance is excluded: of n + r values without a trend, the last r are the largest with this probability."""
        return len(run) >= self.min_run and math.comb(len(run) + len(before), len(run)) >= 1 / self.chance

    def _is_proof_beside_peers(self, run: Spreads, before: Spreads, limit: float) -> bool:
        """Judge the same if one rank alone passed the limit each time.

        All other values of it and its peers count against it.
        """
        if not all(_is_alone_above(point, limit) and point.high_rank == run[0][1].high_rank for _, point in run):
            return False
        num_else = sum(point.num for _, point in before) + sum(point.num - 1 for _, point in run)
        return len(run) >= self.min_run and math.comb(len(run) + num_else, len(run)) >= 1 / self.chance


def _checks(window: Window) -> dict[str, list[Check]]:
    """Return the newest checks of each tensor of the batch, oldest first, of steps where all ranks' numbers were finite."""
    series = window.series[-MAX_STEPS:]
    names = set[str]().union(*(entry.numbers for entry in series))
    leaves = sorted(name[len("batch.") : -len(".absmax")] for name in names if re.fullmatch(r"batch\..+\.absmax", name))
    return {leaf: checks for leaf in leaves if (checks := _of_leaf(series, leaf)[-MAX_CHECKS:])}


def _of_leaf(series: Sequence[StepNumbers], leaf: str) -> list[Check]:
    wanted = {stat: f"batch.{leaf}.{stat}" for stat in ("min", "max", "absmax", "is_constant")}
    found = (
        (entry.step, {stat: entry.numbers[name] for stat, name in wanted.items() if name in entry.numbers})
        for entry in series
        if wanted["absmax"] in entry.numbers
    )
    return [
        (step, stats)
        for step, stats in found
        if {"min", "max"} <= stats.keys()
        and all(math.isfinite(spread.low) and math.isfinite(spread.high) for spread in stats.values())
    ]


def _is_whole(checks: Sequence[Check]) -> bool:
    return all(
        float(found[stat].low).is_integer() and float(found[stat].high).is_integer()
        for _, found in checks
        for stat in ("min", "max")
    )


def _is_mask(checks: Sequence[Check]) -> bool:
    """Whether the tensor holds only 0 and 1, and now only 1: a mask of sequences of full length."""
    return (
        all(found["min"].low >= 0 and found["max"].high <= 1 for _, found in checks) and checks[-1][1]["min"].high == 1
    )


def _is_negative(value: float) -> bool:
    return value < 0 and value not in IGNORED


def _is_alone(point: Spread) -> bool:
    return point.high == 1 and point.low == 0 and round(point.mean * point.num) == 1


def _usual_constancy(run: Spreads, before: Spreads, *, is_alone: bool) -> float:
    """Return how often a batch is constant by chance; if one rank is alone, its peers' batches count as well."""
    if not is_alone:
        return (sum(point.high == 1 for _, point in before) + 1) / (len(before) + 2)
    num_else = sum(point.num for _, point in before) + sum(point.num - 1 for _, point in run)
    return (sum(round(point.mean * point.num) for _, point in before) + 1) / (num_else + 2)


def _is_alone_above(point: Spread, limit: float) -> bool:
    """Whether the peers' mean, and so all but a negligible part of their values, is below this limit."""
    return point.num > 1 and point.mean * point.num - point.high < limit and point.low >= 0


def _run(points: Spreads, holds: Callable[[Spread, Spread], bool]) -> Spreads:
    """Return the newest points in a row for which `holds` is True."""
    for length, (_, point) in enumerate(reversed(points)):
        if not holds(point, points[-1][1]):
            return points[len(points) - length :]
    return points


def _jumped(points: Spreads, limit: Callable[[float], float]) -> tuple[Spreads, Spreads]:
    """Split the points where all later ones exceed a limit made from the largest earlier one.

    The first of the two parts is the later one; it is empty if there is no such place.
    """
    highs = [point.high for _, point in points]
    tops = list(accumulate(highs, max))
    floors = list(accumulate(reversed(highs), min))[::-1]
    for cut in range(1, len(points)):
        if tops[cut - 1] and floors[cut] > limit(tops[cut - 1]):
            return points[cut:], points[:cut]
    return (), points


def _turned(point: Spread) -> Spread:
    """Turn the numbers upside down, so that a drop becomes a jump."""
    return Spread(-point.mean, -point.high, -point.low, point.high_rank, point.low_rank, point.num, point.num_nonfinite)


def _odd_rank(point: Spread, factor: float) -> tuple[int, ...]:
    """Return the rank that differs from all peers by this factor, both of two that cannot be told apart, or none."""
    if point.num < 2 or point.low <= 0 or point.high <= factor * point.low:  # noqa: PLR2004 - a comparison needs two
        return ()
    if point.num == 2:  # noqa: PLR2004 - no majority: what is normalised lies between 0.01 and 100
        is_high_odd, is_low_odd = point.high > 100, point.low < 0.01  # noqa: PLR2004
        if is_high_odd is is_low_odd:
            return tuple(sorted((point.low_rank, point.high_rank)))
        return (point.high_rank,) if is_high_odd else (point.low_rank,)
    total = point.mean * point.num
    if point.high > factor * (total - point.high) / (point.num - 1):
        return (point.high_rank,)
    return (point.low_rank,) if (total - point.low) / (point.num - 1) > point.high / 5 else ()


def _ranks(run: Spreads, end: Literal["low_rank", "high_rank"], *, is_all: bool) -> tuple[int, ...]:
    """Return the ranks that are responsible; (-1,) stands for all ranks."""
    return (-1,) if is_all else tuple(sorted({getattr(point, end) for _, point in run}))


def _finding(window: Window, first: OddTensor, alike: Sequence[OddTensor]) -> Finding:
    is_all = first.ranks == (-1,)
    ranks = tuple(sorted(window.attached)) if is_all else first.ranks
    leaves = tuple(dict.fromkeys(tensor.leaf for tensor in alike))
    what = {
        "constant": "stopped varying",
        "odd_constant": "does not vary, as it does on the other ranks",
        "range": "left its range",
        "scale": "left its usual magnitude",
        "odd_scale": "is of another magnitude than on the other ranks",
    }[first.kind]
    return Finding(
        detector=BatchValues.name,
        severity="warning",
        first_step=first.first_step,
        detected_step=max((entry.step for entry in window.series), default=first.first_step),
        ranks=ranks,
        tensors=leaves,
        summary=f"{listed(leaves)} in the batches of {ranks_text(ranks)} {what} at step {first.first_step}.",
        facts={
            "is_constant": first.kind in {"constant", "odd_constant"},
            "is_out_of_range": first.kind == "range",
            "is_off_scale": first.kind in {"scale", "odd_scale"},
            "is_on_all_ranks": is_all and window.world_size > 1,
            "is_culprit_known": first.is_culprit_known,
            "series": list(dict.fromkeys(tensor.number for tensor in alike)),
        },
        evidence=tuple(
            Evidence(
                kind="batch",
                summary=f"{ranks_text(ranks)}: {tensor.text}",
                values={"leaf": tensor.leaf, "step": tensor.first_step},
            )
            for tensor in alike
        ),
    )
