"""Whether numbers that follow each other keep to a level, or only wander about: the error of their mean, with what they remember.

    50 51 49 50 52 48 51 ...     each says something new: the mean of n is known to their deviation / sqrt(n)
    20 35 60 80 85 70 60 ...     each repeats the one before: for one that remembers `r` of the last, n are worth n (1 - r) / (1 + r)

A short stretch cannot show how long its noise remembers, so that the most it may remember is believed, not the most likely; where it
may be a random walk, nothing is known of its mean. Shared words of `slow_rank`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, stdev

from holter.faults.shared.robust import deviation

MAX_MEMORY = 0.98
"""More than this cannot be told from a random walk."""
MAX_DEVIATIONS = 4.0
"""What is further from the median counts as this far: one pause of seconds says nothing about the rest."""
MIN_CLIP = 0.1
"""Of the median: numbers that are the same to a tenth are clipped no closer."""
MEMORY_ERRORS = 2.5
"""How many standard errors of the memory are believed on top of it."""
BINNED_ERRORS = 1.0
"""The same where there are few, and what they say is the second opinion."""
BIN = 4
"""Numbers are also taken so many together: noise that forgets at once may hide noise that does not."""
MIN_BINS = 20


def error_of_mean(values: Sequence[float], num: int = 0) -> float:
    """Standard error of the mean of `num` numbers (default: as many as these) whose noise is like that of these; at least 3."""
    kept, num = clipped(values), num or len(values)
    error = _error(kept, num, MEMORY_ERRORS)
    if len(kept) >= BIN * MIN_BINS:
        binned = [fmean(kept[begin : begin + BIN]) for begin in range(0, len(kept) - BIN + 1, BIN)]
        error = max(error, _error(binned, num // BIN, BINNED_ERRORS))
    return error


def memory(values: Sequence[float], errors: float = MEMORY_ERRORS) -> float:
    """How much of one number's deviation is still in the next one, at most; 0 to `MAX_MEMORY`."""
    mean = fmean(values)
    total = math.fsum((value - mean) ** 2 for value in values)
    if not total:
        return 0.0
    found = math.fsum((one - mean) * (following - mean) for one, following in pairwise(values)) / total
    # Kendall: short series show too little of it.
    found = max(0.0, found + (1 + 3 * max(0.0, found)) / len(values))
    found += errors * math.sqrt(max(0.0, 1 - found * found) / len(values))
    return min(found, MAX_MEMORY)


def clipped(values: Sequence[float]) -> list[float]:
    """With outliers brought to the edge."""
    centre = median(values)
    width = MAX_DEVIATIONS * max(deviation(values), MIN_CLIP * abs(centre))
    return [min(max(value, centre - width), centre + width) for value in values]


def _error(values: Sequence[float], num: int, errors: float) -> float:
    remembers = memory(values, errors)
    # From step to step a level cannot hide; the deviation within a short stretch is smaller than the one in the long run.
    surprises = [following - remembers * one for one, following in pairwise(values)]
    noise = max(stdev(values), stdev(surprises) / math.sqrt(1 - remembers * remembers))
    return noise * math.sqrt(min(1.0, (1 + remembers) / (1 - remembers) / num))
