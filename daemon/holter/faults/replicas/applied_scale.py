"""Applied scale: gradients that were reduced are multiplied by a whole number before the optimizer gets them, from some step on.

What it detects
    Gradients as the optimizer is given them that are two, four, sixty-four times what the reduction left, or a half or an eighth of
    it, always by the same number, at four comparisons or more, after at least eight at which nothing came between. Of all
    parameters, or of some of them.

Why it matters
    A sum where a mean was meant, or a division that is made twice, is another learning rate for whatever it concerns. The loss falls
    all the same, and nothing else shows it: all ranks do the same.

False positives
    A clip, by torch or by hand, has another factor at each step, and so do noise and weights by tokens. A factor that goes with
    the number of micro-batches or of samples is a division by it. A loss scaler's factor is taken out. What is there from the first
    step on is how the run is written. What is multiplied with zero is frozen by hand.

What to do
    Look for what multiplies or divides `.grad` between `backward` and `step` (`holter explain gradient_scale_mismatch`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.parting import column, request, tables_at
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import modules_of, named
from holter.faults.window import StepNumbers, Window
from holter.records import Evidence, Finding, Table

CLASSES = ("gradients_reduced", "gradients")
SAME = 1e-3
"""Factors this close, relatively, count as one: norms are reported in single precision."""
LEAST, LARGEST = 1.5, 4096
SHOWN = 3


@dataclass(frozen=True)
class AppliedScale:
    """Judges what happened to the gradients between the reduction and the optimizer."""

    name: ClassVar[str] = "applied_scale"

    min_before: int = threshold(8, at_least=2)
    """Number of first comparisons at which the optimizer was given what the reduction left."""
    min_steps: int = threshold(4, at_least=2)
    """Number of comparisons with another factor."""
    num_tables: int = threshold(3, at_least=2)
    """Number of these that are looked at tensor by tensor."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding, or a request for tables until they are there or cannot be had."""
        told = [(entry, factor) for entry in window.series if (factor := _factor(entry)) is not None]
        odd = [(entry, factor) for entry, factor in told if abs(factor - 1) > SAME]
        first = next((place for place, (_, factor) in enumerate(told) if abs(factor - 1) > SAME), 0)
        if first < self.min_before or len(odd) < self.min_steps or _goes_with_the_batch(told, odd):
            return
        chosen, rank = [entry.step for entry, _ in odd[: self.num_tables]], min(window.attached)
        needs = tuple(
            asked for step in chosen for name in CLASSES if (asked := request(window, name, step, (rank,))) is not None
        )
        if needs:
            yield Finding(
                detector=self.name,
                severity="info",
                first_step=chosen[0],
                detected_step=odd[-1][0].step,
                ranks=tuple(sorted(window.attached)),
                summary="The optimizer is given other gradients than the reduction left.",
                needs=needs,
            )
            return
        looked = [_of_tensors(window, entry, rank) for entry, _ in odd[: self.num_tables]]
        factor, tensors = _one_factor(looked)
        if tensors:
            yield _finding(window, odd, factor, tensors, num_tensors=len(looked[0]), before=told[first - 1][0].step)


def _factor(entry: StepNumbers) -> float | None:
    """Return the factor from the reduced norm to the given one, or to that of a clip before it.

    None if it was not read, or ranks differ.
    """
    reduced, given = entry.numbers.get("norm.gradients_reduced"), entry.numbers.get("norm.gradients")
    clipped = entry.numbers.get("clip.norm")
    given = clipped if clipped and given and given.num == clipped.num else given
    if reduced is None or given is None or given.num_nonfinite or reduced.num_nonfinite or min(reduced.low, given.low) <= 0:  # fmt: skip
        return None
    if max(given.high / given.low, reduced.high / reduced.low) > 1 + SAME:
        return None
    scale = entry.numbers.get("loss_scale")
    return given.mean / reduced.mean * (scale.mean if scale else 1.0)


def _goes_with_the_batch(told: Sequence[tuple[StepNumbers, float]], odd: Sequence[tuple[StepNumbers, float]]) -> bool:
    """Whether steps with another factor always have other numbers of micro-batches or samples than the usual steps."""
    usual = {_size(entry) for entry, factor in told if abs(factor - 1) <= SAME}
    return not usual & {_size(entry) for entry, _ in odd}


def _size(entry: StepNumbers) -> tuple[float, ...]:
    found = (entry.numbers.get(name) for name in ("micro_steps", "batch.num_samples"))
    return tuple(spread.mean if spread else 0.0 for spread in found)


def _of_tensors(window: Window, entry: StepNumbers, rank: int) -> dict[str, float]:
    """Return the factor of each tensor at one step, without what a clip and a loss scaler did to all of them."""
    reduced, given = (_norms(tables_at(window, name, entry.step, (rank,)), rank) for name in CLASSES)
    norm, limit = entry.numbers.get("clip.norm"), entry.numbers.get("clip.limit")
    clip = min(1.0, limit.mean / (norm.mean + 1e-6)) if norm and limit else 1.0
    scale = entry.numbers.get("loss_scale")
    usual = clip / (scale.mean if scale else 1.0)
    return {
        name: given[name] / norm / usual for name, norm in reduced.items() if name in given and norm > 0 and usual > 0
    }


def _norms(tables: Mapping[int, Table], rank: int) -> dict[str, float]:
    return column(tables[rank], tables[rank].norms) if rank in tables else {}


def _one_factor(looked: Sequence[Mapping[str, float]]) -> tuple[float, tuple[str, ...]]:
    """Return the factor by which the same tensors were multiplied at all these steps, and those tensors.

    (1, ()) unless the factor or its inverse is a whole number.
    """
    found = [{name: f for name, f in factors.items() if abs(f - 1) > 10 * SAME} for factors in looked]
    values = [value for factors in found for value in factors.values()]
    if not values or not all(factors.keys() == found[0].keys() for factors in found):
        return 1.0, ()
    middle = sorted(values)[len(values) // 2]
    whole = middle if middle > 1 else 1 / middle if middle > 0 else 0.0
    is_whole = LEAST < whole < LARGEST and abs(whole - round(whole)) < SAME * whole
    is_one = all(abs(value / middle - 1) < 2 * SAME for value in values) if middle > 0 else False
    return (middle, tuple(found[0])) if is_whole and is_one else (1.0, ())


def _finding(  # noqa: PLR0913 - what was found, all of it
    window: Window,
    odd: Sequence[tuple[StepNumbers, float]],
    factor: float,
    tensors: tuple[str, ...],
    *,
    num_tensors: int,
    before: int,
) -> Finding:
    first = odd[0][0].step
    times = f"{factor:.4g}" if factor > 1 else f"1/{1 / factor:.4g}"
    whose = "all tensors" if len(tensors) == num_tensors else named(tensors)
    return Finding(
        detector=AppliedScale.name,
        severity="warning",
        first_step=first,
        detected_step=odd[AppliedScale.min_steps - 1][0].step,
        ranks=tuple(sorted(window.attached)),
        tensors=tensors,
        modules=modules_of(tensors),
        summary=f"Since step {first} the optimizer is given {times} times what the reduction left of the gradients ({whose}).",
        facts={"is_scale_apart": True, "is_scale_one": False, "is_from_a_step_on": True},
        evidence=(
            Evidence(
                kind="gradient",
                summary=f"up to step {before} the optimizer was given what the reduction left; at {len(odd)} compared steps since step {first}, {len(tensors)} of {num_tensors} tensors come to it multiplied by {times}",
                values={"factor": factor, "num_tensors": len(tensors), "before": before, "num_steps": len(odd)},
            ),
            *(
                Evidence(
                    kind="gradient",
                    summary=f"step {entry.step}: the norm of all gradients is {ratio:.4g} times that of the reduced ones",
                    values={"step": entry.step, "ratio": ratio if math.isfinite(ratio) else None},
                )
                for entry, ratio in odd[:SHOWN]
            ),
        ),
    )
