"""The series of a run that are judged together, and what is asked of one of them: its level, its stretches, its scatter. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from holter.faults.shared.robust import deviation
from holter.records import Evidence, Finding, Severity

Points = list[tuple[int, float]]
MAX_BLOCKS = 60
DETECTOR = "curve"
"""Under this name the rows of `causes` know these findings."""


@dataclass(frozen=True)
class Curves:
    """The series of one run that are judged together."""

    loss: Points
    norm: Points
    rate: Points
    evaluations: dict[str, Points]
    scale: Points
    memory: Points
    is_reward: bool = False
    """Reinforcement learning: its loss is no measure of anything."""
    is_adversarial: bool = False
    is_rate_computed: bool = False
    """The log has no rates: these are what the settings give."""
    skipped: Points = field(default_factory=list)
    """Steps that the loss scaler skipped, since the last log or since the beginning."""
    stages: tuple[int, ...] = ()
    """Steps at which the log says that another stage of its plan began."""
    lost: tuple[str, ...] = ()
    """What a policy is measured by and is no number at the last logs."""


def finite(points: Points) -> Points:
    """Without what is not a number."""
    return [(step, value) for step, value in points if math.isfinite(value)]


def blocks(points: Points) -> list[tuple[int, int, float]]:
    """(place of the first, place after the last, median) of stretches of equal length, few enough to look at."""
    size = max(1, math.ceil(len(points) / MAX_BLOCKS))
    made = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        if len(part) * 2 >= size:
            made.append((begin, begin + len(part), median(value for _, value in part)))
    return made


def scatter(series: Sequence[float]) -> float:
    """Of a single value, whatever the trend: from second differences, robust."""
    bends = [a - 2 * b + c for a, b, c in zip(series, series[1:], series[2:], strict=False)]
    # Of very few the middle one is the trend itself.
    return deviation(bends) / math.sqrt(6) if len(bends) > 3 else 0.0  # noqa: PLR2004 - as above


def finding(  # noqa: PLR0913, PLR0917
    severity: Severity, step: int, last: int, summary: str, facts: dict[str, Any], evidence: Sequence[Evidence]
) -> Finding:
    """A verdict of this file's."""
    return Finding(
        detector=DETECTOR,
        severity=severity,
        first_step=step,
        detected_step=last,
        ranks=(),
        summary=summary,
        facts=facts,
        evidence=tuple(evidence),
    )
