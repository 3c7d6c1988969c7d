"""Gradient scale: within one model, the gradients of some parameters are a whole number of times what they are for the others.

What it detects
    Every parameter's gradient is a sum over the losses of some ranks, divided by a number. Losses over divisor must be the same for
    all parameters of a model. Found are parameters for which it is not (one module of `fully_shard` with another divide factor or
    another mesh; experts that receive the tokens of all ranks and are divided by fewer, or by nobody; gradients that were whole on
    every rank and that the script summed again), and a model whose gradients are averaged over one axis of its mesh and summed over
    another.

Why it matters
    Those parameters train with a multiple of the learning rate; clipping by a common norm takes from the others what these have too
    much. The loss falls all the same, and the run cannot be compared with one on another number of ranks.

False positives
    A sum over all ranks instead of a mean is silent: whoever divides the loss by the tokens of all ranks wants it. So is a divide
    factor that is no size of an axis. Experts that nobody divides are information where it changes nothing: an optimizer like Adam,
    and no clipping. Comm hooks, parameters' own hooks and other frameworks are not judged.

What to do
    Divide by the same number everywhere: `set_gradient_divide_factor` of the experts, or one reduction (`holter explain
    gradient_scale_mismatch`).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import modules_of, named
from holter.faults.window import Window
from holter.records import Evidence, Finding, GradientScales, ScaleGroup


@dataclass(frozen=True)
class GradientScale:
    """Judges by how much gradients are divided."""

    name: ClassVar[str] = "gradient_scale"

    tolerance: float = threshold(0.02, above=0, below=0.5)
    """Scales this close, relatively, are one scale."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        told = [(note.step, scales) for note, scales in window.notes_of(GradientScales)]
        if not told:
            return
        step = min(step for step, _ in told)
        is_free = all(scales.is_scale_free for _, scales in told)
        # Several ranks report the same about what all of them hold.
        groups = list({(tuple(g.names.names), g.how): g for _, scales in told for g in scales.groups}.values())
        usual = _usual(groups)
        odd = [group for group in groups if abs(_scale(group) / usual - 1) > self.tolerance]
        if odd:
            yield _finding(window, step, odd, groups, usual, is_free=is_free)
        elif mixed := [group for group in groups if _is_mixed(group)]:
            yield _finding(window, step, mixed, mixed, 1.0, is_free=False)


def _scale(group: ScaleGroup) -> float:
    """Return how many times the mean over its losses a group's gradient is."""
    return group.num_losses / group.divisor


def _usual(groups: Sequence[ScaleGroup]) -> float:
    """Return 1 if some group has that scale, a mean over the losses; otherwise the scale of most parameters."""
    if any(math.isclose(_scale(group), 1.0) for group in groups):
        return 1.0
    counts: dict[float, int] = {}
    for group in groups:
        counts[_scale(group)] = counts.get(_scale(group), 0) + group.names.count
    return min(counts, key=lambda scale: (-counts[scale], scale))


def _is_mixed(group: ScaleGroup) -> bool:
    """Whether the gradients are averaged over some axes and summed over the others."""
    choices = (itertools.combinations(group.axes, size) for size in range(1, len(group.axes)))
    return group.divisor in {float(math.prod(some)) for some in itertools.chain.from_iterable(choices)}


def _finding(  # noqa: PLR0913 - what was found, all of it
    window: Window, step: int, odd: Sequence[ScaleGroup], groups: Sequence[ScaleGroup], usual: float, *, is_free: bool
) -> Finding:
    tensors = tuple(name for group in odd for name in group.names.names)
    times = _scale(odd[0]) / usual
    is_measured = all("measured" in group.how for group in odd)
    count = sum(group.names.count for group in odd)
    others = "what they are for the other parameters" if len(odd) < len(groups) else "the mean over all ranks"
    return Finding(
        detector=GradientScale.name,
        severity="info" if is_free and is_measured else "warning",
        first_step=0,
        detected_step=step,
        ranks=tuple(sorted(window.attached)),
        tensors=tensors,
        modules=modules_of(tensors),
        summary=f"The gradients of {count} parameters ({named(tensors)}) are {times:.3g} times {others}.",
        facts={"is_scale_apart": True, "is_scale_one": False},
        evidence=tuple(
            Evidence(
                kind="gradient",
                summary=f"{group.names.count} parameters ({named(group.names.names)}; {group.how}): losses of {group.num_losses} ranks, divided by {group.divisor:.4g}"
                + (f"; reduced over axes of {' x '.join(map(str, group.axes))} ranks" if len(group.axes) > 1 else ""),
                values={
                    "num_losses": group.num_losses,
                    "divisor": group.divisor,
                    "scale": _scale(group),
                    "axes": group.axes,
                },
            )
            for group in [*odd[:3], *[group for group in groups if group not in odd][:2]]
        ),
    )
