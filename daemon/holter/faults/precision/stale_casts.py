"""Stale casts: within one autocast region the weights changed and the model still computes with the old ones.

What it detects
    A model that is called twice in one autocast region, with the same input, whose weights were changed in place between the two
    calls and whose outputs are equal bit for bit. A logged KL that is exactly zero says the same.

Why it matters
    Autocast keeps the cast copy of each weight until its region ends. A reference that is swapped into the policy's module is then
    never seen: the KL term is zero, and the policy is held to nothing.

False positives
    Weights that hardly differ may give equal outputs in bf16: a distance below one in ten thousand counts only if it is seen again
    and again. Equal weights, as at the first step, have no distance and raise nothing.

What to do
    Open a region of its own for the second set of weights, or turn the cache off (`holter explain stale_autocast_cache`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.shared.wording import ranks_text
from holter.faults.window import Note, Window
from holter.records import Evidence, Finding, Swapped

KL = re.compile(r"log\.(.*[^a-z])?kl([^a-z].*)?$", re.IGNORECASE)


@dataclass(frozen=True)
class StaleCasts:
    """Judges calls of a model after a swap of its weights."""

    name: ClassVar[str] = "stale_casts"

    sure_distance: float = 1e-4
    """Relative distance from which on equal outputs cannot be an accident of rounding."""
    least_distance: float = threshold(1e-6, above=0, at_most="sure_distance")
    """Relative distance from which on they count if seen several times."""
    num_times: int = 3
    """Number of times that they must then have been seen."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding."""
        swaps = [(note, swap) for note, swap in window.notes_of(Swapped) if swap.distance > 0]
        zero_steps = _zero_kl_steps(window)
        stale = [(note, swap) for note, swap in swaps if swap.is_input_equal and swap.is_output_equal]
        sure = [(note, swap) for note, swap in stale if self._is_sure(stale, note, swap)]
        # With a different input the output proves nothing, but a KL of exactly zero does.
        told = [
            (note, swap) for note, swap in swaps if not swap.is_input_equal and swap.distance >= self.least_distance
        ]
        found = sure or (told if len(zero_steps) >= self.num_times else [])
        if found:
            yield _finding(found, zero_steps, is_seen=bool(sure))

    def _is_sure(self, stale: list[tuple[Note, Swapped]], note: Note, swap: Swapped) -> bool:
        if swap.distance >= self.sure_distance:
            return True
        num_seen = max(swap.num_times, sum(other.rank == note.rank for other, _ in stale))
        return swap.distance >= self.least_distance and num_seen >= self.num_times


def _zero_kl_steps(window: Window) -> list[int]:
    """Return the steps at which a logged KL was exactly zero, if it never was anything else."""
    names = {name for entry in window.series for name in entry.numbers if KL.match(name)}
    for name in sorted(names):
        values = window.values(name)
        if all(spread.low == spread.high == 0 and not spread.num_nonfinite for _, spread in values):
            return [step for step, _ in values]
    return []


def _finding(found: list[tuple[Note, Swapped]], zero_steps: list[int], *, is_seen: bool) -> Finding:
    note, swap = found[0]
    ranks = tuple(sorted({other.rank for other, _ in found}))
    return Finding(
        detector=StaleCasts.name,
        severity="critical",
        first_step=note.step,
        detected_step=note.step,
        ranks=ranks,
        summary=f"Weights that were swapped inside an autocast region are not used: the model was called with others (relative distance {swap.distance:.2g}) and answered with the old ones, so that any KL between the two is exactly 0.",
        facts={
            "is_output_equal": True if is_seen else None,
            "do_weights_differ": True,
            "is_kl_zero": True if zero_steps else None,
        },
        evidence=tuple(_evidence(found, ranks, zero_steps, is_seen=is_seen)),
    )


def _evidence(
    found: list[tuple[Note, Swapped]], ranks: tuple[int, ...], zero_steps: list[int], *, is_seen: bool
) -> Iterator[Evidence]:
    note, swap = found[0]
    yield Evidence(
        kind="weights",
        summary=f"{ranks_text(ranks)}, step {note.step}: between two calls in one autocast region the weights changed by a relative distance of {swap.distance:.3g}",
        values={"distance": swap.distance, "step": note.step, "num_times": found[-1][1].num_times},
    )
    if is_seen:
        yield Evidence(
            kind="output",
            summary="both calls had the same input and gave the same output, bit for bit: a KL between them is exactly 0",
            values={"is_input_equal": swap.is_input_equal, "is_output_equal": swap.is_output_equal},
        )
    if zero_steps:
        yield Evidence(
            kind="log",
            summary=f"the logged KL was exactly 0 at all {len(zero_steps)} steps at which it was logged, from step {zero_steps[0]}",
            values={"kl": 0.0, "num_steps": len(zero_steps)},
        )
