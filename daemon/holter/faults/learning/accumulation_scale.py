"""Accumulation scale: the gradient grows with the number of micro-batches in a step.

What it detects
    Steps of more micro-batches whose gradients are larger by as much as a sum makes them, not a mean, where the number of micro-batches
    varied by a factor of two or more. Where it never varied, a loss that is not divided before `backward` is reported as information.

Why it matters
    Summed micro-batches multiply the learning rate by their number, and every later change of the accumulation changes it again.

False positives
    A mean over k times as many samples has a norm between 1/sqrt(k) and 1 of the smaller one's, a sum between sqrt(k) and k: nothing
    under nine tenths of sqrt(k) counts. Only steps next to a change of the number are compared, so that a norm that falls over the run
    does not disturb. Norms that differ as much among steps of the same number do not count, nor do norms that differ by far more than a
    sum explains (an optimizer that calls a closure until it is content). The short last group of an epoch, divided by the full number, is
    reported as information only, and so is a gradient that may be divided later than where holter looks.

What to do
    Divide each micro-batch's loss by the number of micro-batches, or by the samples of the whole step (`holter explain
    accumulation_not_normalised`).
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.robust import deviation
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding, Vitals

REACH = 8
"""Number of steps before and after a change of the number that are compared."""


@dataclass(frozen=True)
class _Comparison:
    few: int
    many: int
    norm_few: float
    norm_many: float
    scatter: float
    """Robust deviation of the norms' logarithms among steps with the same number."""
    source: str
    first_step: int
    last_step: int

    @property
    def ratio(self) -> float:
        return self.norm_many / self.norm_few

    @property
    def limit(self) -> float:
        """The ratio between what noise makes of a sum and what it makes of a mean."""
        return max(0.9 * math.sqrt(self.many / self.few), 1.25, math.exp(2.5 * self.scatter))

    @property
    def is_sum(self) -> bool:
        """Whether a sum explains the ratio, and explains all of it."""
        return self.limit < self.ratio < 2 * self.many / self.few


@dataclass(frozen=True)
class AccumulationScale:
    """Compares gradient norms with the number of micro-batches."""

    name: ClassVar[str] = "accumulation_scale"

    min_steps: int = 3
    """Number of steps of either number of micro-batches."""
    min_ratio: float = threshold(2.0, at_least=2)  # Below this a sum's noise and a mean's overlap.
    """The larger steps must have at least this many times as many micro-batches."""
    min_constant_steps: int = 8
    """Number of steps after which a constant number with an undivided loss is mentioned."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        counts = {step: int(spread.low) for step, spread in window.values("micro_steps") if spread.low == spread.high}
        if max(counts.values(), default=0) < 2:  # noqa: PLR2004 - no accumulation
            return
        divided = {step: spread.high > 0 for step, spread in window.values("loss.is_divided") if step in counts}
        is_divided = any(divided.values()) if divided else None
        compared = self._compare(window, counts)
        if compared is not None:
            if compared.is_sum:
                yield _scaled(window, compared, is_divided=is_divided)
        elif is_divided is False and len(set(counts.values())) == 1 and len(divided) >= self.min_constant_steps:
            yield _undivided(window, counts)

    def _compare(self, window: Window, counts: dict[int, int]) -> _Comparison | None:
        """Compare by the first view of the norm that covers both numbers; the views nearer to the optimizer come first."""
        for source, norms in _views(window):
            known = sorted(step for step in counts if norms.get(step, 0.0) > 0 and math.isfinite(norms[step]))
            near = _near_changes(known, counts)
            by_count: dict[int, list[int]] = {}
            for step in near:
                by_count.setdefault(counts[step], []).append(step)
            enough = sorted(count for count, steps in by_count.items() if count > 0 and len(steps) >= self.min_steps)
            if len(enough) > 1 and enough[-1] >= self.min_ratio * enough[0]:
                few, many = enough[0], enough[-1]
                groups = [[norms[step] for step in by_count[count]] for count in (few, many)]
                small, large = (statistics.median(group) for group in groups)
                scatter = max(deviation([math.log(norm) for norm in group]) for group in groups)
                return _Comparison(few, many, small, large, scatter, source, near[0], near[-1])
        return None


def _views(window: Window) -> Iterator[tuple[str, dict[int, float]]]:
    yield "the norm that clipping was told", {step: s.mean for step, s in window.values("clip.norm")}
    given: dict[int, float] = {}
    for note, vitals in window.notes_of(Vitals):
        given[note.step] = math.sqrt(sum(m.gradient_norm**2 for m in vitals.modules if math.isfinite(m.gradient_norm)))
    yield "the norm of what the optimizer was given", given
    yield "the norm of the rank's own gradients", {step: s.mean for step, s in window.values("gradient_norm")}


def _near_changes(steps: list[int], counts: dict[int, int]) -> list[int]:
    """Return the steps within reach of a change of the number, ascending."""
    changes = [i for i in range(1, len(steps)) if counts[steps[i]] != counts[steps[i - 1]]]
    near = {j for i in changes for j in range(max(0, i - REACH), min(len(steps), i + REACH))}
    return [steps[i] for i in sorted(near)]


def _scaled(window: Window, found: _Comparison, *, is_divided: bool | None) -> Finding:
    scale = found.many / found.few
    return Finding(
        detector=AccumulationScale.name,
        severity="warning" if is_divided is False else "info",
        first_step=found.first_step,
        detected_step=found.last_step,
        ranks=tuple(sorted(window.attached)),
        summary=f"The gradient norm grows with the number of micro-batches: {found.norm_few:.3g} with {found.few} of them, {found.norm_many:.3g} with {found.many}.",
        facts={"does_norm_scale": True, "is_loss_divided": is_divided},
        evidence=(
            Evidence(
                kind="gradient",
                summary=f"{found.source}: {found.norm_few:.4g} (median) with {found.few} micro-batches, {found.norm_many:.4g} with {found.many}",
                values={"ratio": found.ratio, "limit": found.limit, "few": found.few, "many": found.many},
            ),
            Evidence(
                kind="bound",
                summary=f"a mean would make this ratio {1 / math.sqrt(scale):.2g} to 1, a sum {math.sqrt(scale):.2g} to {scale:.2g}; it is {found.ratio:.2g}",
                values={"ratio": found.ratio},
            ),
        ),
    )


def _undivided(window: Window, counts: dict[int, int]) -> Finding:
    num, first = next(iter(counts.values())), min(counts)
    return Finding(
        detector=AccumulationScale.name,
        severity="info",
        first_step=first,
        detected_step=first + AccumulationScale.min_constant_steps - 1,
        ranks=tuple(sorted(window.attached)),
        summary=f"Each step is made of {num} micro-batches, and none of their losses is divided before backward: the gradient may be their sum.",
        facts={"does_norm_scale": None, "is_loss_divided": False},
        evidence=(
            Evidence(
                kind="loss",
                summary=f"{num} backward passes a step, at every step seen; what backward was called on is no quotient",
                values={"micro_steps": num},
            ),
        ),
    )
