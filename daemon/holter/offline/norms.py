"""Judges gradient norms that are not finite, or exactly zero, with the loss beside them or without. Pure."""

import math
from statistics import median

from holter.offline.points import Curves, Points, finding, finite
from holter.records import Evidence, Finding, Severity

MIN_NAN_NORMS = 10
"""Number of NaN norms that a loss scaler in search of its scale does not cause, because it skips fewer steps."""
END_OF_SEARCH = 50
"""Step after which a loss scaler has ended its search."""
MIN_FINITE = 3
"""Number of norms that must have been finite before the first non-finite one means anything."""


def hidden(curves: Curves) -> Finding | None:
    """Find a loss of exactly zero beside NaN norms, which a logger shows that leaves out NaN and then has no values to average."""
    zeros = len(curves.loss)
    while zeros and curves.loss[zeros - 1][1] == 0:
        zeros -= 1
    num = len(curves.loss) - zeros
    if num < 2 or curves.is_reward or curves.is_adversarial:  # noqa: PLR2004 - once is an empty batch
        return None
    since = curves.loss[zeros][0]
    step = _since_norm(curves, since)
    norms = [value for at, value in curves.norm if at >= step]
    is_nan = len(norms) > 1 and sum(not math.isfinite(value) for value in norms) >= 0.8 * len(norms)
    falls = [value for _, value in curves.loss[max(0, zeros - 5) : zeros]]
    if not is_nan and (norms or not falls or min(falls) < 0.05 or num < 5):  # noqa: PLR2004 - it has arrived
        return None
    return finding(
        "critical", step, curves.loss[-1][0],
        f"The logged loss is exactly 0 since step {since}" + (f", and the gradient norm is NaN{'' if step == since else f' since step {step}'}." if is_nan else ", from one log to the next."),
        {"is_hidden": True, "is_norm_nan": is_nan or None, "series": ["loss", "gradient_norm"]},
        [Evidence(kind="trend", summary=f"loss exactly 0 at the last {num} logs" + (f", gradient norm NaN at {sum(not math.isfinite(v) for v in norms)} of {len(norms)}" if norms else "; the log has no gradient norm"), values={"step": step, "num_logs": num})],
    )  # fmt: skip


def _since_norm(curves: Curves, step: int) -> int:
    """Return the step since which the norm was not finite, if that was before `step`, from which on the loss is shown as zero; else `step`."""
    for at, value in reversed(curves.norm):
        if at < step:
            if math.isfinite(value):
                break
            step = at
    return step


def came_back(curves: Curves) -> Finding | None:
    """Find a loss that was not finite at a few logs and is finite again.

    If most values are NaN, the script only has nothing to report there; the first log may be from before the first batch.
    """
    lost = [step for step, value in curves.loss[1:-1] if not math.isfinite(value)]
    if not lost or len(lost) > max(2, len(curves.loss) // 5) or curves.is_adversarial:
        return None
    steps = ", ".join(map(str, lost[:4])) + (", ..." if len(lost) > 4 else "")  # noqa: PLR2004 - a sentence
    return finding(
        "info", lost[0], curves.loss[-1][0], f"The loss was NaN or Inf at {len(lost)} of {len(curves.loss)} logs (step {steps}), and is a number again.",
        {"is_nan_for_a_while": True, "series": ["loss", "gradient_norm"]},
        [Evidence(kind="trend", summary=f"loss: not a number at step {steps}, {curves.loss[-1][1]:.4g} at the end: those steps were skipped, or their NaN reached no weight", values={"step": lost[0], "num_logs": len(lost)})],
    )  # fmt: skip


def not_finite(curves: Curves) -> Finding | None:
    """Find norms that are NaN from some step to the end, while the loss gets no better."""
    norm = curves.norm
    first = len(norm)
    while first and not math.isfinite(norm[first - 1][1]):
        first -= 1
    if first == len(norm):
        return None
    if first == 0:
        return _never_finite(curves)
    num, step = len(norm) - first, norm[first][0]
    if num < max(5, len(norm) // 20):
        return _at_the_end(norm, first)
    before, after = [[v for at, v in finite(curves.loss) if (at >= step) is side] for side in (False, True)]
    if not before or not after or median(after[-5:]) < 0.97 * median(before[-5:]):
        return None
    return _of_norms("critical", norm[first:], "and the loss gets no better", is_brief=False)


def _never_finite(curves: Curves) -> Finding | None:
    """Find norms that were never finite; some loggers never know the norm, and then the loss falls nevertheless."""
    norm, loss = curves.norm, [value for _, value in finite(curves.loss)]
    num, part = len(norm), max(1, len(loss) // 4)
    is_search = norm[0][0] <= END_OF_SEARCH and num < MIN_NAN_NORMS
    if num < 2 or (is_search and not loss):  # noqa: PLR2004 - once is a skipped step
        return None
    if not loss:
        return _of_norms(
            "info" if is_search else "warning", norm, "and the log has no loss", is_brief=True, is_norm_first=False
        )
    is_better = median(loss[-part:]) < 0.97 * median(loss[:part])
    if curves.is_reward or (is_better and num >= MIN_NAN_NORMS):
        return None
    so_far = "and the loss falls" if is_better else "and the loss gets no better"
    is_brief = is_search or is_better or num < MIN_NAN_NORMS
    return _of_norms("info" if is_search or is_better else "warning", norm, so_far, is_brief=is_brief)


def _at_the_end(norm: Points, first: int) -> Finding | None:
    """Find a few norms at the end that are the first non-finite ones.

    The log ends before it shows whether only a step was skipped.
    """
    if first < MIN_FINITE or any(not math.isfinite(value) for _, value in norm[:first]):
        return None
    return _of_norms("info", norm[first:], "for the first time, and the log ends there", is_brief=True)


def _of_norms(severity: Severity, lost: Points, so_far: str, *, is_brief: bool, is_norm_first: bool = True) -> Finding:  # fmt: skip
    step, num = lost[0][0], len(lost)
    logs = f"all {num} logs since step {step}" if num > 1 else f"the last log, at step {step}"
    return finding(
        severity, step, lost[-1][0], f"The gradient norm is NaN or Inf at {logs}, {so_far}.",
        {"is_nan": True, "is_norm_first": is_norm_first, "is_brief": is_brief, "is_from_start": False, "is_explosive": False, "has_norm": True, "series": ["gradient_norm", "loss"]},
        [Evidence(kind="trend", summary=f"gradient norm: NaN or Inf at {num} logs, from step {step} to the end", values={"step": step, "num_logs": num})],
    )  # fmt: skip


def lost(curves: Curves) -> Finding | None:
    """Find a policy's KL or entropy that is not finite, which shows that the model's outputs are not, whatever the loss shows."""
    if not curves.lost:
        return None
    end = curves.loss[-1][0] if curves.loss else curves.norm[-1][0] if curves.norm else -1
    begin = curves.loss[-2][0] if len(curves.loss) > 1 else end
    names = ", ".join(f"`{name}`" for name in curves.lost)
    is_norm = len(curves.norm) > 1 and not any(math.isfinite(value) for _, value in curves.norm[-2:])
    beside = ", and so is the gradient norm" if is_norm else ""
    return finding(
        "critical" if is_norm else "warning", begin, end, f"{names} is NaN or Inf at the last logs{beside}: the model's outputs are not finite.",
        {"is_nan": True, "is_norm_first": False, "is_from_start": False, "is_explosive": False, "has_norm": is_norm, "series": ["gradient_norm"]},
        [Evidence(kind="trend", summary=f"{names}: NaN or Inf at the last two logs or more{beside}", values={"step": begin})],
    )  # fmt: skip


def silent(curves: Curves) -> Finding | None:
    """Find norms that are exactly zero at all of the last logs."""
    norm = finite(curves.norm)
    first = len(norm)
    while first and norm[first - 1][1] == 0:
        first -= 1
    num = len(norm) - first
    if num >= 10 and not curves.is_reward:  # noqa: PLR2004 - not by chance
        return finding(
            "warning", norm[first][0], norm[-1][0], f"The gradient norm is exactly 0 at all {num} logs since step {norm[first][0]}.",
            {"is_norm_zero": True, "is_still": False, "series": ["gradient_norm", "loss"]},
            [Evidence(kind="trend", summary=f"gradient norm exactly 0 at the last {num} logs", values={"step": norm[first][0], "num_logs": num})],
        )  # fmt: skip
    return None
