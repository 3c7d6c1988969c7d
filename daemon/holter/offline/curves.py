"""Judges what a curve alone shows, with few points or many: since when a loss rises, is not a number or never moves, and where two curves separate.

The live detectors need dozens of single steps; a log may have ten epochs, or a point per thousand steps, smoothed, resumed
and with gaps. Here levels are medians of stretches. A change is compared with the scatter of its own curve and with how far
the curve had fallen before, and it must last until the end: a curve that comes back shows no fault. Pure.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from msgspec.structs import replace

from holter.offline import norms, still
from holter.offline.points import Curves, Points, blocks, finding, finite, scatter
from holter.records import Evidence, Finding

MIN_POINTS = 6
MIN_SKIPPED, MIN_SKIPPED_LOGS = 16, 3
"""Number of steps skipped in a row, and of logs that show it, from which on this is no search for a scale, which takes fewer."""
FEW = 20
"""Number of stretches below which a robust scatter says little."""


@dataclass(frozen=True)
class CurveOnset:
    """Where a curve left its best stretch for good."""

    place: int
    step: int
    best: float
    now: float
    start: float
    noise: float


def judge(curves: Curves) -> Iterator[Finding]:
    """Yield at most one finding on the loss or the norm, and those that other curves show by themselves."""
    found = _nonfinite(curves)
    if found is None:
        found = norms.silent(curves)
    if found is None and not curves.is_reward and not curves.is_adversarial:
        found = (
            _divergence(curves)
            or _overfitting(curves)
            or still.plateau(curves)
            or still.ran_out(curves)
            or still.stopped(curves)
        )
    if found is None:
        found = norms.came_back(curves)
    if found is not None:
        yield found
    if (leak := _leak(curves.memory)) is not None:
        yield leak
    if (collapse := _scale(curves) or _skipped(curves)) is not None:
        yield collapse


def rise(points: Points, *, is_rate_up: bool = False) -> CurveOnset | None:
    """Return since when the curve has been far above its best stretch, until the end; None if it does not end there.

    A curve that is falling again does not count. If the learning rate went up for good (`is_rate_up`), a slow fall after the
    jump is no recovery.
    """
    if len(points) < MIN_POINTS:
        return None
    made = blocks(points)
    levels = [level for _, _, level in made]
    tail = max(2, len(levels) // 10)
    # The best stretch is not one of the last.
    place = min(range(len(levels) - tail), key=lambda i: levels[i])
    best, now = levels[place], median(levels[-tail:])
    start = median(levels[: max(1, min(3, place))])
    # With few points that fall and then rise, their differences are the trend itself and no scatter.
    noise = max(0.0 if _is_turned(levels, place) else scatter(levels), 0.005 * abs(best), 1e-9)
    height, way = now - best, max(0.0, start - best)
    since = levels[place + 1 :]
    # A single odd stretch at the end is no rise.
    enough = 0.0 if _is_steady_climb(levels[place:], best) else 0.3 * way
    if len(since) < 2 or height < max(6 * noise, enough, 0.15 * abs(best)):  # noqa: PLR2004 - as above
        return None
    is_on_its_way_back = now < best + 0.6 * (max(since) - best) and now < 0.95 * start and not is_rate_up
    if (
        is_on_its_way_back
        or _is_wandering(levels[: place + 1], height)
        or (len(levels) < FEW and _is_to_and_fro(levels[place:], height))
        or _came_back_before(levels, place, height)
        or (not is_rate_up and now < 0.95 * start and _is_shift(levels, place, height))
    ):
        return None
    return _onset(points, made, place, best, now, start, noise)


def _is_steady_climb(levels: Sequence[float], best: float) -> bool:
    """Whether the curve climbs from stretch to stretch for long, to nearly twice its best.

    Then it need not have lost much of its earlier fall.
    """
    ups = sum(b > a for a, b in pairwise(levels))
    return len(levels) >= 10 and ups >= 0.85 * (len(levels) - 1) and levels[-1] > 1.8 * best > 0  # noqa: PLR2004 - no few, no chance


def _is_turned(levels: Sequence[float], place: int) -> bool:
    """Whether a few points fall steadily to the best level, and then rise steadily to more than twice of it."""
    down, up = levels[: place + 1], levels[place:]
    return (
        len(levels) < FEW
        and len(up) > 3  # noqa: PLR2004 - two points are no way
        and all(b <= a for a, b in pairwise(down))
        and all(b > a for a, b in pairwise(up))
        and up[-1] > 2 * up[0] > 0
    )


def _is_wandering(levels: Sequence[float], height: float) -> bool:
    """Whether the curve had risen about as far before its best stretch and come back."""
    deepest, lowest = 0.0, math.inf
    for level in levels:
        lowest = min(lowest, level)
        deepest = max(deepest, level - lowest)
    return height < 1.5 * deepest


def _is_to_and_fro(levels: Sequence[float], height: float) -> bool:
    """Whether the curve fell more than once and lost most of its rise: with few points, that is scatter."""
    lost, highest = 0.0, -math.inf
    falls = [a - b for a, b in pairwise(levels) if a > b]
    for level in levels:
        highest = max(highest, level)
        lost = max(lost, highest - level)
    return lost > 0.6 * height and len(falls) > 1


def _came_back_before(levels: Sequence[float], place: int, height: float) -> bool:
    """Whether the curve had risen as far since its best stretch and come back, as it does with harder data at each stage."""
    back = max(i for i in range(place, len(levels)) if levels[i] <= levels[place] + 0.3 * height)
    return max(levels[place : back + 1]) - levels[place] > height


def _is_shift(levels: Sequence[float], place: int, height: float) -> bool:
    """Whether the curve stepped up at once and has been falling since, as after a change of data or layers, which is no divergence."""
    after = levels[place + 1 :]
    top = max(range(len(after)), key=lambda i: after[i])
    falling = after[top:]
    if len(falling) < 5:  # noqa: PLR2004 - too few to tell
        return False
    pairs = [b < a for i, a in enumerate(falling) for b in falling[i + 1 :]]
    return sum(pairs) > 0.8 * len(pairs) and falling[0] - median(falling[-2:]) > 0.1 * height


def _onset(  # noqa: PLR0913, PLR0917
    points: Points, made: list[tuple[int, int, float]], place: int, best: float, now: float, start: float, noise: float
) -> CurveOnset:
    """Return the onset: the first point after the last one that is at the level of the best stretch."""
    limit = best + max(0.1 * (now - best), 3 * noise)
    own = scatter([value for _, value in points])
    limit = max(limit, best + 2 * own) if best + 2 * own < best + 0.5 * (now - best) else limit
    series = [value for _, value in points]
    smooth = [median(series[max(0, i - 1) : i + 2]) if len(series) > 30 else series[i] for i in range(len(series))]  # noqa: PLR2004 - single points count among few
    first = len(points) - 1
    while first > made[place][0] and smooth[first - 1] > limit:
        first -= 1
    # If the curve rises in one line, the line began where it meets the best level.
    while first > made[place][0] + 1 and smooth[first - 1] - best > 2 * noise and smooth[first - 1] > smooth[first - 2]:
        first -= 1
    return CurveOnset(first, points[first][0], best, now, start, noise)


def jump_of(rates: Points, until: int, span: int, since: int | None = None) -> tuple[int, float, float] | None:
    """Return (step, before, after) of the last jump of the rate shortly before step `until` that is no warm-up; None if there is none.

    A jump is a rise by half or more from one log to the next. `span` is the number of steps of the whole curve.
    """
    known = finite(rates)
    found = None
    # The loss may already be worse at the log before the one that shows the jump.
    latest = max(until + span // 50, next((step for step, _ in known if step > until), until))
    for (_, before), (step, after) in zip(known, known[1:], strict=False):  # noqa: RUF007
        if step > latest or (since is not None and step < since):
            continue
        num_before = sum(at < step for at, _ in known)
        is_warm_up = all(
            b >= a
            for (_, a), (_, b) in zip(known[:num_before], known[1:num_before], strict=False)  # noqa: RUF007
        ) and num_before < max(3, len(known) // 20)
        if before > 0 and after >= 1.5 * before and not is_warm_up and until - step <= 0.1 * span + 1:
            found = (step, before, after)
    return found


def is_at_peak(rates: Points, step: int) -> bool | None:
    """Whether the rate was near its highest value at this step; None if the log has no rates."""
    known = finite(rates)
    if not known:
        return None
    top = max(rate for _, rate in known)
    at = next((rate for when, rate in known if when >= step), known[-1][1])
    return top > 0 and at >= 0.8 * top


def _nonfinite(curves: Curves) -> Finding | None:
    loss = curves.loss
    hidden = norms.hidden(curves) or still.underflowed(curves)
    if hidden is not None:
        # A hidden loss may be the end of a rise.
        blow = _blow_up(curves, finite([point for point in loss if point[0] < hidden.first_step]), hidden.first_step)
        return hidden if blow is None else replace(blow, evidence=(*blow.evidence, *hidden.evidence))
    if not loss or math.isfinite(loss[-1][1]):
        return norms.not_finite(curves) or norms.lost(curves)
    first = len(loss) - 1
    while first and not math.isfinite(loss[first - 1][1]):
        first -= 1
    step, before = loss[first][0], finite(loss[:first])
    blow = _blow_up(curves, before, step)
    if blow is not None:
        return blow
    measured = [value for at, value in curves.norm if at <= step]
    is_backward = (
        bool(measured) and any(not math.isfinite(value) for at, value in curves.norm if at < step) and bool(before)
    )
    shown = f"{before[-1][1]:.4g} at step {before[-1][0]}" if before else "no finite value before"
    return finding(
        "critical", step, loss[-1][0], f"The loss is NaN or Inf since step {step}, out of ordinary values: {shown}." if before else f"The loss is NaN or Inf at every log, from step {step} on.",
        {"is_nan": True, "is_norm_first": is_backward, "is_from_start": not before, "is_explosive": False, "has_norm": bool(measured), "series": ["loss", "gradient_norm"]},
        [Evidence(kind="trend", summary=f"loss: {shown}, not finite at all {len(loss) - first} logs since step {step}", values={"step": step, "num_logs": len(loss) - first})],
    )  # fmt: skip


def _blow_up(curves: Curves, before: Points, step: int) -> Finding | None:
    """Find a rise of loss or norm that led to the NaN at this step; None if values were ordinary before."""
    if len(before) < 3:  # noqa: PLR2004 - nothing to compare with
        return None
    base = median(value for _, value in before[: max(1, len(before) * 3 // 4)])
    recent = before[-max(2, min(10, len(before) // 5)) :]
    norms = [(at, value) for at, value in curves.norm if at <= step]
    usual = median(value for _, value in finite(norms)[: max(1, len(norms) * 3 // 4)]) if finite(norms) else 0.0
    is_norm = usual > 0 and any(
        not math.isfinite(value) or value > 10 * usual
        for _, value in norms[-max(2, min(10, len(norms) // 5)) :]
        if value == value  # noqa: PLR0124
    )
    is_loss = max(value for _, value in recent) > base + max(abs(base), 6 * scatter([value for _, value in before]))
    if not (is_norm or is_loss):
        return None
    limit = base + max(0.5 * abs(base), 3 * scatter([value for _, value in before[: len(before) * 3 // 4]]))
    first = _since(before, limit, step) if is_loss else next((at for at, value in norms if value > 10 * usual), step)
    return _of_rise(curves, first, base, math.inf, before[0][1], has_norm=is_norm, is_nan=True)


def _since(points: Points, limit: float, otherwise: int) -> int:
    """Return the step from which on all points are above a limit; `otherwise` if the last one is not."""
    first = otherwise
    for step, value in reversed(points):
        if value <= limit:
            break
        first = step
    return first


def _divergence(curves: Curves) -> Finding | None:
    known = finite(curves.loss)
    if (away := _run_away_below(curves, known)) is not None:
        return away
    # Harder data are no divergence: each stage of a plan is judged by itself.
    bounds = [-math.inf, *curves.stages, math.inf]
    stages = ([point for point in known if begin <= point[0] < end] for begin, end in pairwise(bounds))
    onset = next((found for stage in stages if (found := rise(stage, is_rate_up=_is_rate_up(curves.rate)))), None)
    return (
        _of_rise(curves, onset.step, onset.best, onset.now, onset.start, has_norm=None, is_nan=False) if onset else None
    )


def _is_rate_up(rates: Points) -> bool:
    """Whether the rate was raised threefold from one log to the next in mid-run, and stayed up until the end."""
    known = finite(rates)
    for place in range(max(3, len(known) // 20), len(known)):
        before, after = known[place - 1][1], known[place][1]
        if before > 0 and after >= 3 * before:
            return min(rate for _, rate in known[place:]) >= 0.8 * after
    return False


def _run_away_below(curves: Curves, known: Points) -> Finding | None:
    """Find a loss that was positive for long and then falls below zero, faster and faster.

    Something is maximised that should be minimised. The negative log-likelihood of a density passes zero too, but early, and
    then slows down.
    """
    if len(known) < MIN_POINTS or known[-1][1] >= 0:
        return None
    below = next((place for place in range(len(known) - 1, -1, -1) if known[place][1] >= 0), -1) + 1
    before, end = [value for _, value in known[:below]], median(value for _, value in known[-3:])
    is_settled = len(before) >= max(10, 0.15 * len(known)) and median(before[-5:]) < 0.5 * max(before)
    if not is_settled or -end < 5 * max(map(abs, before)):
        return None
    step, usual = known[below][0], median(before)
    return finding(
        "critical", step, known[-1][0], f"The loss falls without bound since step {step}: {end:.4g} at the end, {usual:.4g} before.",
        {"is_rising": True, "has_jump": False, "is_early": False, "is_at_peak": None, "is_beyond_start": True, "is_norm_up": False, "has_rate": bool(curves.rate), "came_back": False, "is_nan": False,
         "is_explosive": True, "series": ["loss", "gradient_norm"]},
        [Evidence(kind="trend", summary=f"loss: usually {usual:.4g}, below zero since step {step}, {end:.4g} at the end: a term with the wrong sign, or one that has no bound", values={"step": step, "usual": usual, "now": end})],
    )  # fmt: skip


def _of_rise(  # noqa: PLR0913
    curves: Curves, step: int, best: float, now: float, start: float, *, has_norm: bool | None, is_nan: bool
) -> Finding:
    first, last = curves.loss[0][0], curves.loss[-1][0]
    span = max(1, last - first)
    jump = jump_of(curves.rate, step, span)
    norms = finite(curves.norm)
    usual = median([value for at, value in norms if at < step] or [value for _, value in norms[:3]] or [0.0])
    peak = max(
        ((value, at) for at, value in curves.norm if at >= step - span // 20 and value == value),  # noqa: PLR0124
        key=lambda one: (one[0], -one[1]),
        default=(0.0, step),
    )
    norm_first = next((at for at, value in norms if usual > 0 and value > 5 * usual and at >= step - span // 10), None)
    is_norm = usual > 0 and peak[0] > 10 * usual if has_norm is None else has_norm
    is_early = step - first <= 0.25 * span
    is_peak = is_at_peak(curves.rate, step)
    is_beyond = is_nan or now > max(2 * abs(start), start + 2 * abs(start - best)) or now > 1000 * max(abs(best), 1e-9)
    evidence = [Evidence(kind="trend", summary=f"loss: {start:.4g} at first, {best:.4g} in its best stretch, {'NaN or Inf' if is_nan else f'{now:.4g}'} at the end, up since step {step}",
                         values={"start": start, "best": best, "now": None if is_nan else now, "step": step})]  # fmt: skip
    if jump and not curves.is_rate_computed:
        evidence.insert(
            0,
            Evidence(
                kind="schedule",
                summary=f"learning rate {jump[1]:.3g} before step {jump[0]}, {jump[2]:.3g} from it on, {jump[2] / jump[1]:.3g} times as much",
                values={"step": jump[0], "before": jump[1], "after": jump[2]},
            ),
        )
    elif curves.rate and not curves.is_rate_computed:
        rate = next((value for at, value in curves.rate if at >= step), curves.rate[-1][1])
        evidence.append(
            Evidence(
                kind="schedule",
                summary=f"learning rate {rate:.3g} at step {step}, {'near its highest' if is_peak else 'below its highest'}; no jump before it",
                values={"step": step, "rate": rate},
            )
        )
    if usual > 0 and peak[0] > 3 * usual:
        evidence.append(
            Evidence(
                kind="trend",
                summary=f"gradient norm: usually {usual:.3g} before, {'Inf' if math.isinf(peak[0]) else f'{peak[0]:.3g}'} at step {peak[1]}",
                values={"usual": usual, "peak": peak[0] if math.isfinite(peak[0]) else None, "step": peak[1]},
            )
        )
    if jump:
        step = jump[0]
        says = "By the settings beside the log the learning rate" if curves.is_rate_computed else "The learning rate"
        head = f"{says} went from {jump[1]:.3g} to {jump[2]:.3g} at step {step}, and the loss rises since"
    else:
        head = f"The loss rises since step {step} and does not come back"
    return finding(
        "critical" if is_nan or now > 1000 * max(abs(best), abs(start)) else "warning", step, last, f"{head}: {'NaN or Inf' if is_nan else f'{now:.4g}'} at the end, after {best:.4g} at its best.",
        {"is_rising": True, "has_jump": bool(jump), "is_early": is_early, "is_at_peak": is_peak, "is_beyond_start": bool(is_beyond), "is_norm_up": bool(is_norm),
         "is_norm_first": norm_first is not None and norm_first <= step, "has_rate": bool(curves.rate), "is_rate_computed": curves.is_rate_computed, "came_back": False, "is_nan": False, "is_explosive": True,
         "series": ["loss", "gradient_norm"]},
        evidence,
    )  # fmt: skip


def _overfitting(curves: Curves) -> Finding | None:
    training = finite(curves.loss)
    for name, points in curves.evaluations.items():
        known = finite(points)
        if len(known) < 5:  # noqa: PLR2004 - fewer show no trend
            if (soon := _overfitting_of_few(name, known, training)) is not None:
                return soon
            continue
        place = min(range(len(known)), key=lambda i: known[i][1])
        step, best = known[place]
        since = [value for _, value in known[place + 1 :]]
        if len(since) < 3 or best <= 0:  # noqa: PLR2004 - as above
            continue
        # A curve that rises from one evaluation to the next until the end is measured at its end.
        is_steady = all(b > a for a, b in pairwise([best, *since]))
        level = since[-1] if is_steady else median(since[-3:])
        noise = scatter([value for _, value in known])
        if level < best * 1.12 or level < best + 4 * noise or max(level, since[-1]) < best + 0.6 * (max(since) - best):
            continue
        before = [value for at, value in training if at <= step][-5:]
        after = [value for at, value in training if at <= known[-1][0]][-5:]
        has_training = len(before) >= 1 and len(after) >= 1 and training[-1][0] > step
        # Medians of five scatter half as much as single values do.
        least = max(0.07 * median(before), 1.6 * scatter([value for _, value in training])) if before else 0.0
        fell = has_training and median(after) < median(before) - least
        if has_training and not fell:
            continue
        return _of_overfitting(
            name, step, best, level, known[-1][0], (median(before), median(after)) if has_training else None
        )
    return None


def _overfitting_of_few(name: str, known: Points, training: Points) -> Finding | None:
    """Find overfitting in three or four evaluations, as fine-tuning has them; it is only a reason to look.

    The evaluations must rise steadily after the best one, by a fifth or more, while the training loss falls by a quarter.
    """
    place = min(range(len(known)), key=lambda i: known[i][1], default=0)
    if not 3 <= len(known) or place == len(known) - 1:  # noqa: PLR2004 - as above
        return None
    (step, best), (last, level) = known[place], known[-1]
    is_steady = all(b > a for (_, a), (_, b) in pairwise(known[place:]))
    before = [value for at, value in training if at <= step][-3:]
    after = [value for at, value in training if step < at <= last][-3:]
    if not (before and after and is_steady and level > 1.2 * best > 0 and median(after) < 0.75 * median(before)):
        return None
    found = _of_overfitting(name, step, best, level, last, (median(before), median(after)))
    return replace(found, severity="info", facts={**found.facts, "is_training_falling": None, "is_few": True})


def _of_overfitting(  # noqa: PLR0913, PLR0917
    name: str, step: int, best: float, level: float, last: int, fell: tuple[float, float] | None
) -> Finding:
    training = (
        f", while the training loss fell from {fell[0]:.4g} to {fell[1]:.4g}"
        if fell
        else "; the training loss is not known"
    )
    return finding(
        "warning" if fell else "info", step, last, f"`{name}` rises since step {step}, from {best:.4g} to {level:.4g}{training}.",
        {"is_overfitting": True, "is_training_falling": True if fell else None, "is_evaluation_rising": True, "series": ["loss", f"log.{name}"]},
        [Evidence(kind="trend", summary=f"`{name}`: best {best:.4g} at step {step}, {level:.4g} at the end{training}", values={"step": step, "best": best, "now": level})],
    )  # fmt: skip


def _leak(memory: Points) -> Finding | None:
    """Find memory that grows from stretch to stretch until the end."""
    known = finite(memory)
    if len(known) < 20:  # noqa: PLR2004 - warm-up alone
        return None
    levels = [level for _, _, level in blocks(known)][2:]
    if len(levels) < 8 or levels[0] <= 0:  # noqa: PLR2004 - as above
        return None
    half = len(levels) // 2
    ups = sum(b > a for a, b in zip(levels, levels[1:], strict=False))  # noqa: RUF007
    if (
        ups < 0.85 * (len(levels) - 1)
        or levels[-1] < 1.3 * levels[0]
        or levels[-1] - levels[half] < 0.3 * (levels[-1] - levels[0])
    ):
        return None
    return finding(
        "warning", known[0][0], known[-1][0], f"Memory grows without bound: {levels[0]:.3g} at first, {levels[-1]:.3g} at step {known[-1][0]}.",
        {"is_leaking": True, "series": ["log.memory"]},
        [Evidence(kind="trend", summary=f"memory rose at {ups} of {len(levels) - 1} stretches, from {levels[0]:.3g} to {levels[-1]:.3g}", values={"first": levels[0], "last": levels[-1]})],
    )  # fmt: skip


def _scale(curves: Curves) -> Finding | None:
    """Find a loss scale that fell below one, so that every step is skipped."""
    known = finite(curves.scale)
    if len(known) < 8 or known[-1][1] >= 1 or max(value for _, value in known) < 64:  # noqa: PLR2004 - it began high
        return None
    top = max(range(len(known)), key=lambda i: (known[i][1], i))
    falls = next((i for i in range(len(known) - 1, 0, -1) if known[i][1] > known[i - 1][1]), top)
    step = known[max(falls, top)][0]
    return finding(
        "critical", step, known[-1][0], f"The loss scale fell from {known[top][1]:g} to {known[-1][1]:g} since step {step}: the scaler skips every step.",
        {"is_scale_collapsed": True, "series": ["loss_scale", "loss"]},
        [Evidence(kind="scaler", summary=f"loss scale {known[top][1]:g} at step {known[top][0]}, {known[-1][1]:g} at step {known[-1][0]}", values={"step": step})],
    )  # fmt: skip


def _skipped(curves: Curves) -> Finding | None:
    """Find a run that skips every step since some log, by the scaler's own count, while the loss gets no better.

    Its scale need not be below one, because some scalers do not go below.
    """
    known = finite(curves.skipped)
    first = len(known)
    while first > 1 and _is_all(known[first - 2], known[first - 1]):
        first -= 1
    if first == len(known):
        return None
    step, last = known[first - 1][0], known[-1][0]
    after = [value for at, value in finite(curves.loss) if at > step]
    before = [value for at, value in finite(curves.loss) if at <= step][-5:]
    is_better = before and after and median(after[-5:]) < 0.99 * median(before)
    if len(known) - first < MIN_SKIPPED_LOGS or last - step < MIN_SKIPPED or is_better:
        return None
    scale = f"; the loss scale is {curves.scale[-1][1]:g}" if curves.scale else ""
    return finding(
        "critical", known[first][0], last, f"All {last - step} steps after step {step} were skipped by the loss scaler{scale}.",
        {"is_scale_collapsed": True, "series": ["loss_scale", "loss"]},
        [Evidence(kind="scaler", summary=f"skipped steps: as many as there were at the last {len(known) - first} logs{scale}", values={"step": known[first][0], "num_logs": len(known) - first})],
    )  # fmt: skip


def _is_all(before: tuple[int, float], now: tuple[int, float]) -> bool:
    """Whether all steps between two logs were skipped; some logs count since the last log, some since the beginning."""
    num = now[0] - before[0]
    return num > 0 and num in {now[1], now[1] - before[1]}
