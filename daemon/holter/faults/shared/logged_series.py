"""Finds what the script or its framework logged, by name, whatever its prefix: `log.train/reward_std` is `reward_std`."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from holter.faults.window import Window

LoggedPoint = tuple[int, float]
"""(step, mean over the ranks that logged it)"""

MAX_LOGS = 512
"""Number of a name's newest values that are looked at."""
MAX_STEPS = 1024
"""A name that was not logged in this many of the newest steps is treated as no longer logged."""
CARRIES = "carries_gradient."
"""Prefix before the name of a logged tensor for whether it needs a gradient; it is no value of its own."""
_HELD_OUT = re.compile(r"(^|[/_.])(eval|val|valid|validation|test|dev)([/_.]|$)")


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """Return a logged name without its prefix, lower case; empty for what was measured on held-out data, and for flags."""
    name = name.lower().removeprefix("log.")
    return "" if _HELD_OUT.search(name) or name.startswith(CARRIES) else name.rpartition("/")[2]


def logged(window: Window, matches: Callable[[str], bool]) -> dict[str, list[LoggedPoint]]:
    """Return the newest values, oldest first, of all numbers whose plain name matches, by full name."""
    names = set[str]().union(*(entry.numbers for entry in window.series[-MAX_STEPS:]))
    found: dict[str, list[LoggedPoint]] = {}
    for name in sorted(name for name in names if (bare := plain(name)) and matches(bare)):
        values = window.values(name)[-MAX_LOGS:]
        points = [(step, spread.mean) for step, spread in values if spread.num > spread.num_nonfinite]
        if points:
            found[name] = points
    return found


def trailing(points: Sequence[LoggedPoint], holds: Callable[[float], bool]) -> Sequence[LoggedPoint]:
    """Return the newest points in a row for which `holds` is True, oldest first."""
    for length, (_, value) in enumerate(reversed(points)):
        if not holds(value):
            return points[len(points) - length :]
    return points


def mostly_trailing(points: Sequence[LoggedPoint], holds: Callable[[float], bool]) -> Sequence[LoggedPoint]:
    """Return the newest points of which nine in ten fulfil `holds`, the first and the last among them."""
    begin, num_others = len(points), 0
    for place in range(len(points) - 1, -1, -1):
        if holds(points[place][1]):
            begin = place
        else:
            num_others += 1
            if 10 * num_others > len(points) - place and (num_others > 1 or place == len(points) - 1):
                break
    return points[begin:]


def halves(points: Sequence[LoggedPoint]) -> Iterator[float]:
    """Yield the median of the first half, then of the second, to tell whether the series rises or falls."""
    middle = len(points) // 2
    for part in (points[:middle], points[middle:]):
        values = sorted(value for _, value in part)
        yield values[len(values) // 2]
