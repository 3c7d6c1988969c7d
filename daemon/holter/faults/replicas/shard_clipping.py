"""Shard clipping: each rank clips its shard by the shard's own norm.

What it detects
    Clip calls on sharded gradients whose total norm differs from rank to rank, at several steps, with the limit exceeded: the norm is that
    of the rank's shard, not of the whole gradient.

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

SHOWN = 3


@dataclass(frozen=True)
class ShardClipping:
    """Judges the norms that clip calls returned."""

    name: ClassVar[str] = "shard_clipping"

    spread: float = threshold(1e-3, above=0)
    """Norms that differ by more than this, relatively, are not one norm; rounding stays far below."""
    min_steps: int = 3
    """At how many steps they must differ."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """At most one finding."""
        norms = dict(window.values("clip.norm"))
        sharded, limits = dict(window.values("clip.is_sharded")), dict(window.values("clip.limit"))
        looked = {
            step: norm for step, norm in norms.items() if step in sharded and sharded[step].low == 1 and norm.num > 1
        }
        apart = {step: norm for step, norm in looked.items() if self._is_apart(norm)}
        is_exceeded = any(step in limits and norm.high > limits[step].low for step, norm in apart.items())
        # Norms that agree now and then are a global norm with something odd at times, not a shard's.
        if is_exceeded and self.min_steps <= len(apart) and 2 * len(apart) > len(looked):
            yield _finding(window, apart, limits)

    def _is_apart(self, norm: Spread) -> bool:
        return norm.num_nonfinite == 0 and norm.high - norm.low > self.spread * norm.high


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
