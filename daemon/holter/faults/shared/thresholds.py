"""Thresholds with bounds, and one check of all of them.

    min_steps: int = threshold(3, at_least=2)  # Once is a coincidence.
    lost_steps: int = threshold(20, at_least="min_steps")

    def __post_init__(self) -> None:
        check_thresholds(self)

A bound is a number, or the name of another threshold of the same detector.
"""

import operator
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, TypeVar

T = TypeVar("T")

TESTS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


def threshold(default: T, **bounds: float | str) -> T:
    """Return a field of a detector with this default; bounds are named as in `TESTS`."""
    assert bounds.keys() <= TESTS.keys(), bounds
    made: Any = field(default=default, metadata={"bounds": bounds})
    return made  # type: ignore[no-any-return]


def check_thresholds(detector: Any) -> None:
    """Raise ValueError for the first threshold out of its bounds, named as the user wrote it. NaN is within no bounds."""
    for one in fields(detector):
        bounds, value = one.metadata.get("bounds", {}), getattr(detector, one.name)
        for word, limit in bounds.items():
            if not TESTS[word](value, getattr(detector, limit) if isinstance(limit, str) else limit):
                raise ValueError(f"{detector.name}.{one.name} must {_in_words(bounds)}, got {value}")


def _in_words(bounds: Mapping[str, float | str]) -> str:
    match dict(bounds):
        case {"above": 0, **more} if not more:
            return "be positive"
        case {"at_least": 0, **more} if not more:
            return "not be negative"
        case {"above": low, "below": high}:
            return f"be between {low} and {high}"
    return "be " + " and ".join(f"{word.replace('_', ' ')} {limit}" for word, limit in bounds.items())
