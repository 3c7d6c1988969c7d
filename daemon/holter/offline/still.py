"""Judges a loss that does not move, because it never did or stopped from one log to the next. Pure."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from holter.faults.shared.robust import deviation
from holter.offline.points import Curves, Points, finding, finite
from holter.records import Evidence, Finding

GUESSES = (
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    10,
    20,
    50,
    100,
    256,
    1000,
    10_000,
    21_841,
    30_522,
    32_000,
    50_257,
    50_304,
    65_536,
    128_256,
    151_936,
)
"""Common numbers of classes or tokens: the loss of guessing among them is their logarithm."""
MIN_STOPPED = 12
"""Number of logs with the same loss; fewer may be chance, or an average over a window."""
SMALLEST = -math.log(1.1754943508222875e-38)
HALF_A_DIGIT = 5e-4


def plateau(curves: Curves) -> Finding | None:
    """Find a loss that never moved, if something shows that it should have."""
    known = finite(curves.loss)
    if len(known) < 12:  # noqa: PLR2004 - too early
        return None
    series = [value for _, value in known]
    level, part = median(series), max(3, len(series) // 4)
    move = abs(median(series[-part:]) - median(series[:part]))
    noise = deviation(series)
    rates = [value for _, value in finite(curves.rate)]
    is_rate_zero = len(rates) >= 12 and max(rates) == 0  # noqa: PLR2004 - as above
    is_moving = move > max(0.5 * noise / math.sqrt(part), 0.004 * abs(level)) or noise > 0.1 * abs(level)
    if abs(level) < 0.05 or (is_moving and not is_rate_zero):  # noqa: PLR2004 - it has arrived
        return None
    is_constant = max(series) - min(series) <= 1e-6 * abs(level)
    classes = next(
        (num for num in GUESSES if abs(level - math.log(num)) < max(0.01 * level, noise / math.sqrt(len(series)))), None
    )
    norms = [value for _, value in finite(curves.norm)]
    is_norm_zero = len(norms) >= 10 and max(norms[1:]) == 0  # noqa: PLR2004 - not by chance
    if not (is_constant or classes or is_rate_zero or is_norm_zero):
        return None
    why = (
        "every gradient is exactly zero"
        if is_norm_zero
        else "the learning rate is zero"
        if is_rate_zero
        else f"it is that of guessing among {classes}"
        if classes
        else "it is the same to the last digit"
    )
    return finding(
        "warning" if is_constant or is_norm_zero or is_rate_zero else "info", known[0][0], known[-1][0], f"The loss has not moved since step {known[0][0]}: {level:.4g} at {len(known)} logs; {why}.",
        {"is_still": True, "is_rising": False, "is_norm_zero": is_norm_zero, "is_rate_zero": is_rate_zero, "is_constant": is_constant, "is_guess": bool(classes), "series": ["loss", "gradient_norm"]},
        [Evidence(kind="trend", summary=f"loss: {level:.4g} +- {noise:.2g} over {len(known)} logs, moved by {move:.2g}; {why}", values={"level": level, "noise": noise, "move": move, "num_logs": len(known)})],
    )  # fmt: skip


def stopped(curves: Curves) -> Finding | None:
    """Find a loss that moved, and then is the same to the last digit at every log until the end.

    A converged loss comes to its end in small steps; this one fell or jumped there at once.
    """
    known = finite(curves.loss)
    first = len(known) - 1
    while first > 0 and known[first - 1][1] == known[-1][1]:
        first -= 1
    num, level = len(known) - first, known[-1][1] if known else 0.0
    if num < MIN_STOPPED or 4 * num < len(known) or first < 2 or abs(level) < 0.05:  # noqa: PLR2004 - it has arrived
        return None
    digit = _last_digit([value for _, value in known])
    moves = [abs(b - a) for (_, a), (_, b) in pairwise(known[: first + 1])]
    if digit > 1e-3 * abs(level) or min(moves[-1], median(moves)) < 20 * digit:
        return None
    step = known[first][0]
    return finding(
        "warning", step, known[-1][0], f"The loss is {level:.6g} to the last digit at all {num} logs since step {step}, and moved before.",
        {"is_still": True, "is_stopped": True, "is_rising": False, "is_norm_zero": False, "is_rate_zero": False, "is_constant": True, "is_guess": False, "series": ["loss", "gradient_norm"]},
        [Evidence(kind="trend", summary=f"loss: {known[first - 1][1]:.6g} at step {known[first - 1][0]}, {level:.6g} at each of the {num} logs from step {step} on", values={"step": step, "level": level, "num_logs": num})],
    )  # fmt: skip


def ran_out(curves: Curves) -> Finding | None:
    """Find a rate that came to exactly zero long before the end, and a loss that stands still since."""
    rates, known = finite(curves.rate), finite(curves.loss)
    first = len(rates)
    while first and rates[first - 1][1] == 0:
        first -= 1
    num = len(rates) - first
    if curves.is_rate_computed or not first or num < MIN_STOPPED or 5 * num < len(rates):
        return None
    step = rates[first][0]
    since = [value for at, value in known if at >= step]
    part = len(since) // 4
    if part < 3:  # noqa: PLR2004 - too few to tell
        return None
    move = abs(median(since[-part:]) - median(since[:part]))
    if move > 3 * deviation(since) / math.sqrt(part) or abs(median(since)) < 0.05:  # noqa: PLR2004 - another group of parameters trains, or it has arrived
        return None
    return finding(
        "warning", step, rates[-1][0], f"The learning rate is 0 since step {step}, and nothing is learnt since: the loss is {median(since):.4g} at all {len(since)} logs.",
        {"is_still": True, "is_rising": False, "is_norm_zero": False, "is_rate_zero": True, "is_constant": False, "is_guess": False, "series": ["loss", "learning_rate"]},
        [Evidence(kind="schedule", summary=f"learning rate {rates[first - 1][1]:.3g} at step {rates[first - 1][0]}, 0 at each of the {num} logs from step {step} on; loss moved by {move:.2g} since", values={"step": step, "num_logs": num, "move": move})],
    )  # fmt: skip


def _last_digit(series: Sequence[float]) -> float:
    """Return the unit of the last decimal that is ever printed: 0.0001 for `0.6931`."""
    decimals = max((len(f"{value:.10f}".rstrip("0").partition(".")[2]) for value in series), default=0)
    return 10.0**-decimals


def is_underflowed(points: Points) -> bool:
    """Whether the series ends with at least two values that are the loss of a probability of zero."""
    return len(points) > 1 and all(abs(value - SMALLEST) < HALF_A_DIGIT for _, value in points[-2:])


def underflowed(curves: Curves) -> Finding | None:
    """Find a loss of exactly 87.3365, minus the logarithm of the smallest normal float32.

    The label's probability was zero or NaN, and was clamped there.
    """
    known = finite(curves.loss)
    first = len(known)
    while first and abs(known[first - 1][1] - SMALLEST) < HALF_A_DIGIT:
        first -= 1
    if len(known) - first < 2:  # noqa: PLR2004 - not by chance
        return None
    step = known[first][0]
    return finding(
        "critical", step, known[-1][0], f"The loss is {known[-1][1]:.6g} since step {step}, the logarithm of the smallest number: probabilities are zero or NaN.",
        {"is_nan": True, "is_norm_first": False, "is_from_start": first == 0, "is_explosive": False, "has_norm": bool(curves.norm), "series": ["loss", "gradient_norm"]},
        [Evidence(kind="trend", summary=f"loss {known[-1][1]:.6g} at the last {len(known) - first} logs, from step {step} on", values={"step": step, "num_logs": len(known) - first})],
    )  # fmt: skip
