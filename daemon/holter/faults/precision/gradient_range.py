"""Gradient range: gradients are so small that their dtype turns them into zeros.

What it detects
    Modules whose gradients in fp16 or bf16 lie at the very bottom of the dtype's range: the largest is not above the smallest
    normal number, most are zero or subnormal, at several checks in a row. The same for fp32 gradients that came out of an fp16
    autocast region without a loss scaler; there also modules without any gradient but zeros, if no module has one of normal size and
    a few that are left, or a tiny loss, say why.

Why it matters
    Below the range a gradient is exactly zero, and what it would have taught is gone. The layers nearest to the input lose theirs
    first.

False positives
    Zeros of a ReLU or of rows that were not looked up stand beside gradients of normal size, and raise nothing. A single step with
    a tiny loss raises nothing either.

What to do
    Scale the loss, or use bf16, whose range is that of fp32 (`holter explain gradient_underflow`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.streaks import Streak, find_streak
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import names_text, ranks_text
from holter.faults.window import Window
from holter.records import Evidence, Finding, Inspection, ModuleVitals, Vitals

SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
TINY_LOSS = 1e-3
"""Gradients of a loss below this may all lie below float16's range."""


@dataclass(frozen=True)
class GradientRange:
    """Compares gradients with the bottom of their dtype's range."""

    name: ClassVar[str] = "gradient_range"

    num_vitals: int = 3
    """Number of reports in a row that must show it."""
    min_steps: int = 4
    """Number of steps that those reports must span."""
    min_lost: float = threshold(0.9, above=0.5, at_most=1)  # A ReLU alone makes half of them zero.
    """Share of gradient values that must be zero or subnormal."""
    min_subnormals: float = 0.02
    """Share that must be subnormal, which proves that the zeros beside them fell out of the range."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        is_half_region = any(found.autocast_dtype == "float16" for _, found in window.notes_of(Inspection))
        has_scaler = any(spread.high > 1 for _, spread in window.values("loss_scale"))
        is_unscaled_half = is_half_region and not has_scaler
        losses = [abs(spread.mean) for _, spread in window.values("loss") if math.isfinite(spread.mean)]
        is_loss_tiny = any(losses) and max(losses) < TINY_LOSS

        def lost(vitals: Vitals) -> list[ModuleVitals]:
            found = [m for m in vitals.modules if self._is_lost(m, is_unscaled_half=is_unscaled_half)]
            return found or (_all_zero(vitals, is_loss_tiny=is_loss_tiny) if is_unscaled_half else [])

        streak = find_streak(
            window, Vitals, lambda v: bool(lost(v)), at_least=self.num_vitals, min_steps=self.min_steps
        )
        if streak is None:
            return
        always = set.intersection(*({module.module for module in lost(vitals)} for _, vitals in streak.notes))
        modules = [module for module in lost(streak.last[1]) if module.module in always]
        if modules:
            yield _finding(streak, modules, has_scaler=has_scaler)

    def _is_lost(self, module: ModuleVitals, *, is_unscaled_half: bool) -> bool:
        zeros, subnormals = module.gradient_zeros, module.gradient_subnormals
        if module.dtype in SMALLEST_NORMAL:
            is_low = 0 < module.gradient_absmax <= SMALLEST_NORMAL[module.dtype]
            return is_low and subnormals >= self.min_subnormals and zeros + subnormals >= self.min_lost
        is_low = 0 < module.gradient_absmax <= SMALLEST_NORMAL["float16"]
        return is_unscaled_half and module.dtype == "float32" and is_low and zeros >= self.min_lost


def _all_zero(vitals: Vitals, *, is_loss_tiny: bool) -> list[ModuleVitals]:
    """Return modules whose gradients are all zero, if the other gradients or the loss show that they fell out of the range."""
    largest = [m.gradient_absmax for m in vitals.modules if math.isfinite(m.gradient_absmax)]
    is_at_bottom = bool(largest) and max(largest) <= SMALLEST_NORMAL["float16"] and (max(largest) > 0 or is_loss_tiny)
    return [m for m in vitals.modules if m.gradient_absmax == 0 and m.gradient_zeros == 1] if is_at_bottom else []


def _finding(streak: Streak[Vitals], modules: list[ModuleVitals], *, has_scaler: bool) -> Finding:
    note = streak.last[0]
    names = tuple(module.module for module in modules)
    is_narrow = all(module.dtype in SMALLEST_NORMAL for module in modules)
    return Finding(
        detector=GradientRange.name,
        severity="warning",
        first_step=streak.first_step,
        detected_step=note.step,
        ranks=streak.ranks,
        modules=names,
        summary=f"The gradients of {names_text(names)} fall below the range of their dtype and become zero.",
        facts={"has_subnormals": is_narrow, "has_normal_gradients": False, "has_loss_scaler": has_scaler},
        evidence=tuple(_evidence(streak, modules)),
    )


def _evidence(streak: Streak[Vitals], modules: list[ModuleVitals]) -> Iterator[Evidence]:
    for module in modules[:4]:
        dtype = module.dtype if module.dtype in SMALLEST_NORMAL else "float16"
        subnormals = 0.0 if math.isnan(module.gradient_subnormals) else module.gradient_subnormals
        yield Evidence(
            kind="gradient",
            summary=f"{module.module}: {module.gradient_zeros:.0%} of its gradient values are zero and {subnormals:.0%} subnormal; the largest is {module.gradient_absmax:.2g}, the smallest normal {dtype} {SMALLEST_NORMAL[dtype]:.2g}",
            values={
                "zeros": module.gradient_zeros,
                "subnormals": subnormals,
                "absmax": module.gradient_absmax,
                "exponents": module.exponents,
            },
        )
    yield Evidence(
        kind="history",
        summary=f"{ranks_text(streak.ranks)}: so at {len(streak.notes)} checks in a row, from step {streak.first_step} to step {streak.last[0].step}",
        values={"num_checks": len(streak.notes)},
    )
