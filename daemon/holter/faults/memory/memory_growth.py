"""Memory growth: a rank's memory rises from step to step, on its host or on its device, and does not settle.

What it detects
    The memory of the rank that holds most, as it is at the end of each step: it has risen through every eighth of the last steps, by at
    least 64 MB and a twentieth in all, and rises now at least half as fast as at first. How many steps are left follows from what the host,
    the container or the device still has. Where a list or another container of the script grows with the steps, it is named.

Why it matters
    A leak of a few megabytes a step ends a run after hours, by the kernel's own hand, without a word, and most often at night.

False positives
    What fills up and then stays (allocators, caches, prefetched batches) slows down and is silent, and so is a staircase. Sequences that
    grow by a curriculum look the same for as long as they grow: it is a warning, never a reason to stop.

What to do
    Look at the named container; else at what is kept beyond a step: losses summed with their graphs, outputs appended to a list,
    caches keyed by shape, workers' copies of a data set.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import ClassVar

from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding, Hoard

BLOCKS = 8
MB = 1 << 20
WARM_UP = 16
"""Number of steps in which allocators and caches fill up."""


@dataclass(frozen=True)
class MemoryGrowth:
    """Judges the memory of the rank that holds most."""

    name: ClassVar[str] = "memory_growth"

    min_steps: int = threshold(40, at_least=2 * BLOCKS)
    """Number of steps through which it must have risen."""
    min_bytes: int = threshold(64 * MB, at_least=1)
    min_share: float = 0.05
    """Share of what it was at the beginning by which it must have grown."""
    steady: float = 0.5
    """The second half must rise at least this share of the first."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield one finding for the host and one for the device."""
        for place in ("host", "device"):
            points = [
                (step, spread.high, spread.high_rank)
                for step, spread in window.values(f"memory.{place}_bytes")
                if step >= WARM_UP
            ]
            found = self._growth(points)
            if found is not None:
                yield _finding(window, place, points, found)

    def _growth(self, points: list[tuple[int, float, int]]) -> tuple[int, float] | None:
        """Return (first step, bytes per step) of the longest stretch until now that only rises; None if there is none."""
        if len(points) < 2 * BLOCKS:
            return None
        # A device is asked only every few steps.
        steps_a_point = (points[-1][0] - points[0][0]) / (len(points) - 1)
        least = max(2 * BLOCKS, math.ceil(self.min_steps / steps_a_point))
        for num in _lengths(len(points), least):
            stretch = points[-num:]
            levels = _levels([held for _, held, _ in stretch])
            # What was held before and given back, such as a list that is cleared after an epoch, is no growth.
            peak = max((held for _, held, _ in points[:-num]), default=0.0)
            grown = levels[-1] - levels[0] if levels[-1] > peak else 0.0
            if grown < max(self.min_bytes, self.min_share * levels[0]) or len({rank for *_, rank in stretch}) > 1:
                continue
            rises = [after - before for before, after in pairwise(levels)]
            half = BLOCKS // 2
            is_steady = sum(rises[half:]) / len(rises[half:]) >= self.steady * sum(rises[:half]) / half
            is_even = min(rises) > 0.2 * median(rises)
            if is_steady and is_even:
                return stretch[0][0], grown / (num * steps_a_point * (BLOCKS - 1) / BLOCKS)
        return None


def _lengths(num: int, least: int) -> Iterator[int]:
    """Yield lengths of stretches until now: all, a half, a quarter and so on, because a leak may have begun late."""
    while num >= least:
        yield num
        num = max(num // 2, least) if num > least else 0


def _levels(values: list[float]) -> list[float]:
    size = len(values) / BLOCKS
    return [median(values[int(i * size) : int((i + 1) * size)]) for i in range(BLOCKS)]


def _finding(window: Window, place: str, points: list[tuple[int, float, int]], growth: tuple[int, float]) -> Finding:
    first_step, rate = growth
    step, _, rank = points[-1]
    lefts = [spread.low for _, spread in window.values(f"memory.{place}_left_bytes")]
    left = lefts[-1] if lefts and lefts[-1] > 0 else None
    num_left = int(left / rate) if left is not None else None
    until = f"; {left / MB:,.0f} MB are left, about {num_left:,} steps" if left is not None else ""
    hoard = _hoard(window, rank)
    said = f"The memory of rank {rank} on its {place} grows by {rate / MB:.1f} MB a step since step {first_step}"
    return Finding(
        detector=MemoryGrowth.name,
        severity="warning",
        first_step=first_step,
        detected_step=step,
        ranks=(rank,),
        summary=f"{said}{until}.",
        facts={"is_host": place == "host", "is_device": place == "device", "has_settled": False, "is_owner_known": hoard is not None, "series": [f"memory.{place}_bytes"]},
        evidence=tuple(_evidence(place, points, growth, num_left, hoard)),
    )  # fmt: skip


def _hoard(window: Window, rank: int) -> Hoard | None:
    """Return the newest report of what keeps the memory."""
    return next((hoard for note, hoard in reversed(list(window.notes_of(Hoard))) if note.rank == rank), None)


def _evidence(
    place: str,
    points: list[tuple[int, float, int]],
    growth: tuple[int, float],
    num_left: int | None,
    hoard: Hoard | None,
) -> Iterator[Evidence]:
    first_step, rate = growth
    step, held, rank = points[-1]
    if hoard is not None:
        yield Evidence(
            kind="owner",
            summary=f"`{hoard.name}` of {hoard.where} grew by {hoard.grown} entries in {hoard.num_steps} steps, to {hoard.length}",
            values={
                "name": hoard.name,
                "where": hoard.where,
                "length": hoard.length,
                "grown": hoard.grown,
                "rank": rank,
            },
        )
    before = next(bytes_ for at, bytes_, _ in points if at >= first_step)
    yield Evidence(
        kind="series",
        summary=f"rank {rank} held {before / MB:,.0f} MB of its {place}'s memory at step {first_step} and {held / MB:,.0f} MB at step {step}",
        values={"rank": rank, "bytes_before": before, "bytes_now": held, "bytes_a_step": rate, "steps_left": num_left},
    )
