"""Defines the series of a run that are judged together, and computes stretches and scatter of one series. Pure."""

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
"""Name of the detector under which the rows of `causes` know these findings."""


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
    """Whether it is reinforcement learning, where the loss measures nothing."""
    is_adversarial: bool = False
    is_rate_computed: bool = False
    """Whether the rates follow from the settings because the log has none."""
    skipped: Points = field(default_factory=list)
    """Number of steps that the loss scaler skipped, since the last log or since the beginning, depending on the logger."""
    stages: tuple[int, ...] = ()
    """Steps at which another stage of the run's plan began, according to the log."""
    lost: tuple[str, ...] = ()
    """Measures of a policy that are not finite at the last logs."""


def finite(points: Points) -> Points:
    """Return the points whose values are finite."""
    return [(step, value) for step, value in points if math.isfinite(value)]


def blocks(points: Points) -> list[tuple[int, int, float]]:
    """Return (index of the first, index after the last, median) of stretches of equal length, at most about `MAX_BLOCKS`."""
    size = max(1, math.ceil(len(points) / MAX_BLOCKS))
    made = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        if len(part) * 2 >= size:
            made.append((begin, begin + len(part), median(value for _, value in part)))
    return made


def scatter(series: Sequence[float]) -> float:
    """Return a robust standard deviation of single values around their trend, from second differences; 0 if there are too few."""
    bends = [a - 2 * b + c for a, b, c in zip(series, series[1:], series[2:], strict=False)]
    # With very few differences, their median is the trend itself.
    return deviation(bends) / math.sqrt(6) if len(bends) > 3 else 0.0  # noqa: PLR2004 - as above


def finding(  # noqa: PLR0913, PLR0917
    severity: Severity, step: int, last: int, summary: str, facts: dict[str, Any], evidence: Sequence[Evidence]
) -> Finding:
    """Make a finding of the detector `curve`."""
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
