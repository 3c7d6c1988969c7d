"""Zero gradients: every gradient of every rank is exactly zero, step after step.

What it detects
    Gradients that exist and whose norm is exactly zero on all ranks, as they were made or as the optimizer is given them: from the
    first step on for eight steps, or later for sixteen after steps at which none was zero.

Why it matters
    Steps are computed, reduced and applied, and teach nothing. The loss is a number that looks like one.

False positives
    A loss that is solved (a margin that all samples keep) comes down to exactly zero, after steps at which some rank's gradient
    was zero already: that is the end of a training, not a fault, and raises nothing.
    Parameters without any gradient are `missing_gradients`'.

What to do
    Look at the last operations before `backward`: a clamp, a floor, a saturated function, a product with zero (`holter explain
    zero_gradients`).
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Spread, Window
from holter.records import Evidence, Finding, Inspection

NORMS = ("gradient_norm", "norm.gradients")
"""Norms of a rank's own gradients, and of those that optimizers are given."""
NUM_BEFORE = 8
"""Number of steps before the first zero that are looked at."""
STILL_LARGE = 0.2
"""Share of its first values: a loss that had fallen below it was about to be solved."""
TINY_LOSS = 1e-3
"""Gradients of a loss below this may be lost below float16's range."""


@dataclass(frozen=True)
class ZeroGradients:
    """Judges norms of gradients that are exactly zero."""

    name: ClassVar[str] = "zero_gradients"

    min_first_steps: int = threshold(8, at_least=2)
    """Number of steps in a row until now, if the norm never was anything else."""
    min_steps: int = 16
    """Number of steps in a row until now, if it was."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: for the result of a rank's backward passes, or else for what its optimizer is given."""
        yield from itertools.islice((found for name in NORMS for found in self._of(window, name)), 1)

    def _of(self, window: Window, name: str) -> Iterator[Finding]:
        norms = window.values(name)
        num = 0
        while num < len(norms) and _is_zero(norms[-1 - num][1]):
            num += 1
        before = norms[: len(norms) - num]
        needed = self.min_steps if before else self.min_first_steps
        if num < needed:
            return
        first, last = norms[len(before)][0], norms[len(before) + needed - 1][0]
        losses = [(step, spread.mean) for step, spread in window.values("loss") if math.isfinite(spread.mean)]
        during = [value for step, value in losses if step >= first]
        if before and not _is_sudden(before, losses, first) and not any(during):
            return
        if _may_be_underflow(window, during) or _is_any_nonfinite(window, first):
            return
        yield _finding(window, first, last, during, is_from_start=not before, is_given=name == NORMS[1])


def _is_zero(norm: Spread) -> bool:
    return norm.high == 0 and norm.low == 0 and not norm.num_nonfinite and norm.num > 0


def _is_sudden(before: list[tuple[int, Spread]], losses: list[tuple[int, float]], first: int) -> bool:
    """Whether it happened from one step to the next, while the loss had not come to its end."""
    past = [abs(value) for step, value in losses if step < first]
    has_left = bool(past) and median(past[-NUM_BEFORE:]) >= STILL_LARGE * median(past[:NUM_BEFORE])
    return has_left and all(norm.low > 0 for _, norm in before[-NUM_BEFORE:])


def _is_any_nonfinite(window: Window, first: int) -> bool:
    """Whether losses or gradients stopped being numbers: the finite part of a tensor of NaN has norm zero."""
    return any(
        spread.num_nonfinite for name in ("loss", *NORMS) for step, spread in window.values(name) if step >= first
    )


def _may_be_underflow(window: Window, losses: list[float]) -> bool:
    """Whether float16 alone can have made the zeros, which `gradient_range` judges."""
    is_half = any(found.autocast_dtype == "float16" for _, found in window.notes_of(Inspection)) or any(
        entry.dtype == "float16" and entry.requires_grad
        for census in window.models.census.values()
        for entry in census.entries
    )
    return is_half and not window.values("loss_scale") and any(losses) and max(map(abs, losses)) < TINY_LOSS


def _finding(  # noqa: PLR0913 - a record's parts
    window: Window, first: int, last: int, losses: list[float], *, is_from_start: bool, is_given: bool
) -> Finding:
    whose = "what the optimizer was given" if is_given else "each rank's own"
    is_flat = bool(losses) and max(losses) == min(losses)
    shown = f"; the loss is {losses[-1]:.4g} at each of them" if is_flat else ""
    return Finding(
        detector=ZeroGradients.name,
        severity="warning",
        first_step=first,
        detected_step=last,
        ranks=tuple(sorted(window.attached)),
        summary=f"Every gradient has been exactly zero since step {first}, on all ranks: nothing is learned.",
        facts={
            "is_from_start": is_from_start,
            "is_loss_constant": is_flat if losses else None,
            "is_any_nonzero": False,
        },
        evidence=(
            Evidence(
                kind="gradient",
                summary=f"gradients were there at steps {first} to {last}, and the norm of {whose} was exactly zero{shown}",
                values={"first_step": first, "last_step": last},
            ),
        ),
    )
