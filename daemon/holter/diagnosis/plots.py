"""The series that belong to a finding, as evidence that a report can draw. Pure.

    {"title": "loss", "log": False, "mark": 40, "lines": [{"name": "mean of 2 ranks", "steps": [..], "values": [1.4, .., None]}]}
    {"title": "exponents of the gradients", "mark": 40, "bars": [{"label": "2^-24", "value": 12}, ..]}

None stands where a value was not finite. A line has at most 200 points: of every stretch the lowest, the highest and what is not
finite stay. A plot illustrates; no cause rests on it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from holter.faults.family import engine_facts
from holter.faults.window import Spread, Window
from holter.records import Evidence, Finding, ModuleVitals, Vitals

KIND = "series"
MAX_PLOTS, MAX_LINES, MAX_POINTS = 8, 8, 200
MIN_POINTS = 2
"""A line of fewer shows nothing."""
LOG_FROM = 100.0
"""Where the largest value is so many times the smallest above zero, the scale is logarithmic."""

Point = tuple[int, float | None]
Line = tuple[str, list[Point]]

EXPONENTS_OF_BUCKET, LOWEST_EXPONENT = 8, -127
EDGES = {"float16": ((-24, "float16: smaller is 0"), (16, "float16: larger is Inf"))}
"""Dtypes with a smaller range than float32 -> the exponents at which the range ends."""


def plots(window: Window, finding: Finding) -> tuple[Evidence, ...]:
    """The plots for a finding: first what its detector looked at, then what everyone asks for."""
    mark = finding.first_step
    named = [name for name in engine_facts(finding).get("series", []) if name not in {"loss", "gradient_norm"}]
    found = [
        *(_plot(_title(name), _over_ranks(window, name), mark) for name in dict.fromkeys(named)),
        _plot("lag at collectives, ms", _lags(window, finding), mark),
        _plot("loss", _over_ranks(window, "loss"), mark),
        _plot("gradient norm", [*_over_ranks(window, "gradient_norm"), *_clipping(window)], mark),
        _plot("distance between ranks, relative", _distances(window), mark),
        _plot("gradient norm by module", _by_module(window, finding, lambda one: one.gradient_norm), mark),
        _plot("weight norm by module", _by_module(window, finding, lambda one: one.weight_norm), mark),
        _plot("learning rate", _changing(_over_ranks(window, "learning_rate")), mark),
        _occupancy(window, finding),
    ]
    return tuple(plot for plot in found if plot is not None)[:MAX_PLOTS]


def thinned(points: Sequence[Point], keep: int) -> list[Point]:
    """At most MAX_POINTS of them, the extremes of every stretch among them, and the one at step `keep`."""
    if len(points) <= MAX_POINTS:
        return list(points)
    width = math.ceil(len(points) / ((MAX_POINTS - 5) // 3))
    chosen = {0, len(points) - 1}
    for begin in range(0, len(points), width):
        chosen.update(_extremes(points, range(begin, min(begin + width, len(points)))))
    chosen.update(number for number, (step, _) in enumerate(points) if step == keep)
    return [points[number] for number in sorted(chosen)]


def words(title: str, line: Sequence[Point], mark: int) -> str:
    """A line in a sentence: `loss: 1.38 at step 20, 1.37 at step 39, not finite at step 40`."""
    at = next((number for number, (step, _) in enumerate(line) if step >= mark), len(line) - 1)
    places = sorted({0, max(0, at - 1), at, len(line) - 1})
    return f"{title}: " + ", ".join(f"{_figure(line[place][1])} at step {line[place][0]}" for place in places)


def _plot(title: str, lines: Iterable[Line], mark: int) -> Evidence | None:
    drawn = [(name, points) for name, points in lines if len(points) >= MIN_POINTS][:MAX_LINES]
    if not drawn or max(points[-1][0] for _, points in drawn) < _oldest(mark):
        return None
    values = [value for _, points in drawn for _, value in points if value is not None]
    sizes = [value for value in values if value > 0]
    is_log = bool(sizes) and min(values) >= 0 and max(sizes) > LOG_FROM * min(sizes)
    name = f"{title}, {drawn[0][0]}" if len(drawn) > 1 else title
    thin = [(name, thinned(points, mark)) for name, points in drawn]
    return Evidence(
        kind=KIND,
        summary=words(name, drawn[0][1], mark),
        values={
            "title": title,
            "log": is_log,
            "mark": mark,
            "lines": [
                {"name": name, "steps": [step for step, _ in points], "values": [_short(value) for _, value in points]}
                for name, points in thin
            ],
        },
    )


def _over_ranks(window: Window, name: str) -> list[Line]:
    """The ranks' mean, and their lowest and highest where these differ."""
    said = window.values(name)
    if not said:
        return []
    num_ranks = max(spread.num for _, spread in said)
    lines = [(f"mean of {num_ranks} ranks" if num_ranks > 1 else "value", _points(said, lambda spread: spread.mean))]
    if any(spread.high - spread.low > 1e-3 * abs(spread.mean) for _, spread in said):
        lines.append(("lowest rank", [(step, _finite(spread.low)) for step, spread in said]))
        lines.append(("highest rank", [(step, _finite(spread.high)) for step, spread in said]))
    return lines


def _lags(window: Window, finding: Finding) -> Iterator[Line]:
    """Of ranks that come late, and what the others are used to; a rank that was not among the few latest was not late."""
    ranks = engine_facts(finding).get("late_ranks", [])[: MAX_LINES - 1]
    for rank in ranks:
        late = [
            (one.step, next((arrival.lag_s for arrival in one.latest if arrival.rank == rank), 0.0))
            for one in window.calls.arrivals
        ]
        yield f"rank {rank}", [(step, lag * 1e3) for step, lag in late]
    if ranks:
        yield "others, at their worst", [(one.step, one.usual_s * 1e3) for one in window.calls.arrivals]


def _points(said: Iterable[tuple[int, Spread]], of: Callable[[Spread], float]) -> list[Point]:
    """The points of a line; a step that was not finite on one rank is not finite."""
    return [(step, None if spread.num_nonfinite else _finite(of(spread))) for step, spread in said]


def _clipping(window: Window) -> Iterator[Line]:
    limit = window.values("clip.limit")
    if limit:
        yield "clipped above", _points(limit, lambda spread: spread.mean)


def _distances(window: Window) -> Iterator[Line]:
    """The spread of a projection over the norm, for each class of tensors in which the ranks differ."""
    names = sorted({name for entry in window.series for name in entry.numbers if name.startswith("sum.")})
    for name in names:
        norms = dict(window.values(f"norm.{name.removeprefix('sum.')}"))
        points: list[Point] = []
        for step, spread in window.values(name):
            norm = norms.get(step)
            if norm is not None and norm.mean > 0 and spread.num > 1:
                is_finite = not (spread.num_nonfinite or norm.num_nonfinite)
                points.append((step, _finite((spread.high - spread.low) / norm.mean) if is_finite else None))
        if any(value for _, value in points):
            yield name.removeprefix("sum.").replace("_", " "), points


def _by_module(window: Window, finding: Finding, of: Callable[[ModuleVitals], float]) -> list[Line]:
    """Those that the finding names, then those that moved most."""
    lines: dict[str, dict[int, float | None]] = {}
    for note, vitals in window.notes_of(Vitals):
        for module in vitals.modules:
            lines.setdefault(module.module, {}).setdefault(note.step, _finite(of(module)))
    named = set(finding.modules)
    ranked = sorted(lines, key=lambda name: (name not in named, -_movement(lines[name].values()), name))
    return [(name or "(root)", sorted(lines[name].items())) for name in ranked[:MAX_LINES]]


def _movement(values: Iterable[float | None]) -> float:
    known = list(values)
    sizes = [abs(value) for value in known if value]
    if None in known:
        return math.inf
    return max(sizes) / min(sizes) if sizes else 0.0


def _changing(lines: list[Line]) -> list[Line]:
    return [line for line in lines if len({value for _, value in line[1]}) > 1]


def _occupancy(window: Window, finding: Finding) -> Evidence | None:
    """Which exponents the gradients had when they were last looked at before it was seen."""
    looks = [
        (note, vitals)
        for note, vitals in window.notes_of(Vitals)
        if note.step <= finding.detected_step and any(module.exponents for module in vitals.modules)
    ]
    if not looks or looks[-1][0].step < _oldest(finding.detected_step):
        return None
    note, vitals = looks[-1]
    named = [module for module in vitals.modules if module.exponents and module.module in finding.modules]
    modules = named or [module for module in vitals.modules if module.exponents]
    counts = [sum(column) for column in zip(*(module.exponents for module in modules), strict=False)]
    used = [bucket for bucket, count in enumerate(counts) if count]
    if not used:
        return None
    dtypes = sorted({module.dtype.removeprefix("torch.") for module in modules})
    return Evidence(
        kind=KIND,
        summary=f"exponents of the gradients at step {note.step}: from {_power(used[0])} to {_power(used[-1] + 1)} in {', '.join(dtypes)}",
        values={
            "title": f"exponents of the gradients at step {note.step}, {', '.join(dtypes)}",
            "bars": [
                {"label": _power(bucket), "value": counts[bucket]}
                for bucket in range(max(0, used[0] - 1), min(len(counts), used[-1] + 2))
            ],
            "edges": [
                {"at": (exponent - LOWEST_EXPONENT) / EXPONENTS_OF_BUCKET - max(0, used[0] - 1), "label": label}
                for dtype in dtypes
                for exponent, label in EDGES.get(dtype, ())
            ],
        },
    )


def _oldest(mark: int) -> int:
    """A series that ended before this step says nothing about the marked one."""
    return mark // 2


def _power(bucket: int) -> str:
    return f"2^{bucket * EXPONENTS_OF_BUCKET + LOWEST_EXPONENT}"


def _extremes(points: Sequence[Point], places: range) -> Iterator[int]:
    finite = [(value, place) for place in places if (value := points[place][1]) is not None]
    if finite:
        yield min(finite)[1]
        yield max(finite)[1]
    yield from [place for place in places if points[place][1] is None][:1]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _title(name: str) -> str:
    return name.removeprefix("log.")


def points_of(line: Mapping[str, Any]) -> list[Point]:
    """A drawn line's points again."""
    return list(zip(line["steps"], line["values"], strict=False))
