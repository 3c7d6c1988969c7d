"""Adapter norm: an adapter's norm sits at the limit that clamps it.

What it detects
    A logged norm of an adapter at or above 0.95 of its logged limit (`lora_norm` and `lora_norm_limit`, `adapter_norm` and
    `max_adapter_norm`), log after log.

Why it matters
    What is clamped at each step can only turn, not grow: the optimizer works against the clamp, its moments fill with gradients that
    never take effect, and the adapter learns less than its loss suggests.

False positives
    A norm that touches its limit now and then is what a limit is for. Without a logged limit nothing is said. Norms of gradients are
    not read: clipping those at every step is common.

What to do
    Raise the limit, or the adapter's rank (`holter explain clamped_adapter_norm`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holter.faults.shared.logged_series import LoggedPoint, logged, plain, trailing
from holter.faults.shared.thresholds import check_thresholds, threshold
from holter.faults.window import Window
from holter.records import Evidence, Finding

NORM = re.compile(r"(adapter|lora|delta).*norm")
GRADIENT = re.compile(r"grad")
LIMIT = re.compile(r"^max_|_?(limit|max|clamp|clip|cap)$")


@dataclass(frozen=True)
class AdapterNorm:
    """Compares a logged norm with its logged limit."""

    name: ClassVar[str] = "adapter_norm"

    share: float = threshold(0.95, above=0, at_most=1)
    """Share of its limit from which on the norm is clamped."""
    min_logs: int = 8
    """Number of logs in a row that must show it."""

    def __post_init__(self) -> None:
        check_thresholds(self)

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield at most one finding: all norms that are at their limits."""
        found = logged(window, lambda name: bool(NORM.search(name)) and not GRADIENT.search(name))
        limits = {
            LIMIT.sub("", plain(name)): points[-1][1] for name, points in found.items() if LIMIT.search(plain(name))
        }
        clamped = {
            name: run for name, points in found.items() if (run := self._clamped(points, limits.get(plain(name))))
        }
        if clamped:
            yield _finding(window, clamped, limits, self.min_logs)

    def _clamped(self, points: Sequence[LoggedPoint], limit: float | None) -> Sequence[LoggedPoint]:
        if limit is None or limit <= 0:
            return ()
        run = trailing(points, lambda value: value >= self.share * limit)
        return run if len(run) >= self.min_logs else ()


def _finding(
    window: Window, clamped: dict[str, Sequence[LoggedPoint]], limits: dict[str, float], min_logs: int
) -> Finding:
    name, run = min(clamped.items(), key=lambda item: (item[1][0][0], item[0]))
    return Finding(
        detector=AdapterNorm.name,
        severity="warning",
        first_step=run[0][0],
        detected_step=run[min_logs - 1][0],
        ranks=tuple(sorted(window.attached)),
        tensors=tuple(sorted(plain(one) for one in clamped)),
        summary=f"{plain(name)} has been at its limit of {limits[plain(name)]:.3g} since step {run[0][0]}.",
        facts={"is_at_limit": True, "is_below_limit": False, "series": sorted(clamped)},
        evidence=tuple(
            Evidence(
                kind="series",
                summary=f"{plain(one)}: {points[-1][1]:.3g} of {limits[plain(one)]:.3g}, at {len(points)} logs in a row",
                values={"name": one, "last": points[-1][1], "limit": limits[plain(one)], "num_logs": len(points)},
            )
            for one, points in sorted(clamped.items())
        ),
    )
