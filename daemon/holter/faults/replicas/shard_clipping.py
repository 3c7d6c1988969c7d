"""Shard clipping: each rank clips its shard by the shard's own norm.

What it detects
    Clip calls on sharded gradients whose total norm differs from rank to rank, at several steps, with the limit exceeded: the norm is that
    of the rank's shard, not of the whole gradient. Where no such call is seen: shards whose norm the script scales, between the reduction
    and the optimizer, by a factor that differs from rank to rank. A factor that stays the same over the steps on one rank alone is no clip.

Why it matters
    The shards of one tensor are scaled by different factors, so that the update no longer points along the gradient; and the same limit
    means something else for each number of ranks. The loss hardly shows it.

False positives
    Norms that are reduced over the shards are equal on all ranks, up to rounding. Norms of the ranks' own unsharded gradients may differ
    and are not judged here, nor is a clip whose limit is never reached.

What to do
    Clip through the wrapper: `model.clip_grad_norm_` (FSDP), `torch.nn.utils.clip_grad_norm_` on DTensors, `accelerator.clip_grad_norm_`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import modules_of, ranks_text
from holter.faults.window import Spread, Window
from holter.records import Evidence, Finding
from holter.records.rank import OWN

SHOWN = 3
SAME = 1e-4
"""Factors this close, relatively, count as one."""


@dataclass(frozen=True)
class ShardClipping:
    """Judges the norms that clip calls returned."""

    name: ClassVar[str] = "shard_clipping"

    spread: float = threshold(1e-3, above=0)
    """Norms that differ by more than this, relatively, are not one norm; rounding stays far below."""
    min_steps: int = 3
    """Number of steps at which they must differ."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        norms = dict(window.values("clip.norm"))
        sharded, limits = dict(window.values("clip.is_sharded")), dict(window.values("clip.limit"))
        looked = {
            step: norm for step, norm in norms.items() if step in sharded and sharded[step].low == 1 and norm.num > 1
        }
        apart = {step: norm for step, norm in looked.items() if self._is_apart(norm)}
        is_exceeded = any(step in limits and norm.high > limits[step].low for step, norm in apart.items())
        # Norms that sometimes agree are a global norm that is odd at times, not a shard's norm.
        if is_exceeded and self.min_steps <= len(apart) and 2 * len(apart) > len(looked):
            yield _finding(window, apart, limits)
            return
        factors = {step: factor for step, factor in window.values("clip.factor") if factor.num > 1}
        scaled = {step: factor for step, factor in factors.items() if self._is_apart(factor)}
        if self.min_steps <= len(scaled) and 2 * len(scaled) > len(factors):
            yield _scaled(window, scaled)

    def _is_apart(self, norm: Spread) -> bool:
        return norm.num_nonfinite == 0 and norm.high - norm.low > self.spread * norm.high


def _scaled(window: Window, scaled: dict[int, Spread]) -> Finding:
    """Make a finding for shards with different factors: each from its own norm, or on one rank always the same factor."""
    steps = sorted(scaled)
    lows, highs = [scaled[step].low for step in steps], [scaled[step].high for step in steps]
    is_fixed = {
        side: max(values) - min(values) <= SAME * max(values) for side, values in (("low", lows), ("high", highs))
    }
    sides = {"low": {scaled[step].low_rank for step in steps}, "high": {scaled[step].high_rank for step in steps}}
    odd = "low" if abs(highs[0] - 1) <= SAME else "high"
    is_one_rank = all(is_fixed.values()) and len(sides[odd]) == 1
    ranks = tuple(sorted(sides[odd])) if is_one_rank else tuple(sorted(window.attached))
    entries = next((census.entries for census in window.models.census.values()), [])
    tensors = tuple(
        entry.name for entry in entries if entry.axis == OWN and entry.requires_grad and not entry.is_buffer
    )
    how = "by another factor than the rest" if is_one_rank else "by different factors"
    return Finding(
        detector=ShardClipping.name,
        severity="warning",
        first_step=steps[0],
        detected_step=steps[0],
        ranks=ranks,
        tensors=tensors,
        modules=modules_of(tensors),
        summary=f"Since step {steps[0]} the shards of the gradients of {ranks_text(ranks)} are scaled {how}.",
        facts={
            "is_limit_exceeded": not is_one_rank,
            "is_sharded_everywhere": not is_one_rank,
            "is_scaled_on_one_rank": is_one_rank,
        },
        evidence=tuple(
            Evidence(
                kind="clipping",
                summary=f"step {step}: between the reduction and the optimizer the norm of the shards was multiplied by {scaled[step].low:.4g} "
                f"on rank {scaled[step].low_rank} and by {scaled[step].high:.4g} on rank {scaled[step].high_rank}",
                values={"step": step, "low": scaled[step].low, "high": scaled[step].high, "axis": OWN},
            )
            for step in steps[:SHOWN]
        ),
    )


def _finding(window: Window, apart: dict[int, Spread], limits: dict[int, Spread]) -> Finding:
    steps = sorted(apart)
    entries = next((census.entries for census in window.models.census.values()), [])
    tensors = tuple(entry.name for entry in entries if entry.is_sharded and entry.requires_grad)
    ranks = tuple(sorted(window.attached))
    return Finding(
        detector=ShardClipping.name,
        severity="warning",
        first_step=steps[0],
        detected_step=steps[0],
        ranks=ranks,
        tensors=tensors,
        modules=modules_of(tensors),
        summary=f"Since step {steps[0]} {ranks_text(ranks)} clip their shards by different norms.",
        facts={"is_limit_exceeded": True, "is_sharded_everywhere": True},
        evidence=tuple(
            Evidence(
                kind="clipping",
                summary=f"step {step}: the clipped norm was {apart[step].low:.4g} on rank {apart[step].low_rank} and {apart[step].high:.4g} on rank "
                f"{apart[step].high_rank}" + (f", with a limit of {limits[step].low:.4g}" if step in limits else ""),
                values={"step": step, "low": apart[step].low, "high": apart[step].high},
            )
            for step in steps[:SHOWN]
        ),
    )
