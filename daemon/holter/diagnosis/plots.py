"""Plots of a finding's series: stored as evidence in its diagnosis, and drawn in a report. Pure.

    {"title": "loss", "log": False, "mark": 40, "lines": [{"name": "mean of 2 ranks", "steps": [..], "values": [1.4, .., None]}]}
    {"title": "exponents of the gradients", "mark": 40, "bars": [{"label": "2^-24", "value": 12}, ..]}
    {"title": "gradient norm by layer", "mark": 40, "heat": {"steps": [0, 10], "rows": [{"name": "head", "values": [0.1, None]}]}}
    {"title": "shares of the parameters", "shares": [{"name": "embeddings", "value": 0.79}, ..]}

None stands for a value that was not finite. A line has at most 200 points: each stretch keeps its lowest and highest
value, and one that is not finite. A plot only illustrates; no cause is concluded from it.

Plots are drawn as inline SVG: without scripts or external files, and with the page's colour variables, so that they
read well on light and dark pages. All text comes from the training script and is escaped. A value that was not finite
interrupts its line and is shown as a cross at the top; the step at which the incident began is a dashed line with its
number.
"""

import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holter.faults.family import engine_facts
from holter.faults.window import Spread, Window
from holter.records import Evidence, Finding, ModuleVitals, Vitals

KIND = "series"
MAX_PLOTS, MAX_LINES, MAX_POINTS = 8, 8, 200
MAX_HEAT_ROWS, MAX_HEAT_STEPS = 40, 80
MIN_POINTS = 2
"""A series with fewer points is not drawn."""
LOG_FROM = 100.0
"""The scale is logarithmic from this ratio of the largest to the smallest positive value on."""

Point = tuple[int, float | None]
Line = tuple[str, list[Point]]

EXPONENTS_OF_BUCKET, LOWEST_EXPONENT = 8, -127
EDGES = {"float16": ((-24, "float16: smaller is 0"), (16, "float16: larger is Inf"))}
"""Dtypes with a smaller range than float32, with the exponents at which that range ends."""

WIDTH, HEIGHT = 680, 210
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 26, 34
NUM_TICKS = 5
BARS, GAP = "▁▂▃▄▅▆▇█", "!"
SIDES = ("lowest rank", "highest rank")
"""Names of the lines that are drawn fainter than the first one."""


def plots(window: Window, finding: Finding) -> tuple[Evidence, ...]:
    """Return the plots for a finding: first the series that its detector used, then those that everyone asks for."""
    mark = finding.first_step
    clipping = ("clipped above", _means(window.values("clip.limit")))
    named = [name for name in engine_facts(finding).get("series", []) if name not in {"loss", "gradient_norm"}]
    found = [
        *(_plot(name.removeprefix("log."), _over_ranks(window, name), mark) for name in dict.fromkeys(named)),
        _plot("lag at collectives, ms", _lags(window, finding), mark),
        _plot("loss", _over_ranks(window, "loss"), mark),
        _plot("gradient norm", [*_over_ranks(window, "gradient_norm"), clipping], mark),
        _plot("distance between ranks, relative", _distances(window), mark),
        _plot("gradient norm by module", _by_module(window, finding, lambda one: one.gradient_norm), mark),
        _plot("weight norm by module", _by_module(window, finding, lambda one: one.weight_norm), mark),
        _plot("learning rate", _changing(_over_ranks(window, "learning_rate")), mark),
        _occupancy(window, finding),
    ]
    return tuple(plot for plot in found if plot is not None)[:MAX_PLOTS]


def heat_map(title: str, rows: Mapping[str, Sequence[Point]], mark: int) -> Evidence | None:
    """Make a heat map of many series, a row each, in the given order.

    Colours follow the logarithm of the values; if there are too many rows or steps, an even selection is shown.
    """
    steps = sorted({step for points in rows.values() for step, _ in points})
    if len(rows) < MIN_POINTS or len(steps) < MIN_POINTS:
        return None
    steps = steps[:: math.ceil(len(steps) / MAX_HEAT_STEPS)]
    chosen = list(rows)[:: math.ceil(len(rows) / MAX_HEAT_ROWS)]
    known = {name: dict(rows[name]) for name in chosen}
    last = {name: next((value for _, value in reversed(rows[name]) if value is not None), None) for name in chosen}
    ends = ", ".join(f"{name} {_figure(last[name])}" for name in (chosen[0], chosen[-1]))
    return Evidence(
        kind=KIND,
        summary=f"{title}: {len(rows)} layers over {len(steps)} steps; first and last of them at the end: {ends}",
        values={
            "title": title,
            "mark": mark,
            "heat": {
                "steps": steps,
                "rows": [
                    {"name": name, "values": [_rounded(known[name].get(step)) for step in steps]} for name in chosen
                ],
            },
        },
    )


def shares(title: str, parts: Mapping[str, float]) -> Evidence:
    """Make a plot of the parts of a whole, given largest first."""
    told = ", ".join(f"{name} {value:.0%}" for name, value in parts.items())
    return Evidence(
        kind=KIND,
        summary=f"{title}: {told}",
        values={
            "title": title,
            "mark": 0,
            "shares": [{"name": name, "value": round(value, 4)} for name, value in parts.items()],
        },
    )


def thinned(points: Sequence[Point], keep: int) -> list[Point]:
    """Reduce a line to at most MAX_POINTS points; the extremes of every stretch and the point at step `keep` are kept."""
    if len(points) <= MAX_POINTS:
        return list(points)
    width = math.ceil(len(points) / ((MAX_POINTS - 5) // 3))
    chosen = {0, len(points) - 1}
    for begin in range(0, len(points), width):
        chosen.update(_extremes(points, range(begin, min(begin + width, len(points)))))
    chosen.update(number for number, (step, _) in enumerate(points) if step == keep)
    return [points[number] for number in sorted(chosen)]


def words(title: str, line: Sequence[Point], mark: int) -> str:
    """Describe a line in a sentence: `loss: 1.38 at step 20, 1.37 at step 39, not finite at step 40`."""
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
                {
                    "name": name,
                    "steps": [step for step, _ in points],
                    "values": [_rounded(value) for _, value in points],
                }
                for name, points in thin
            ],
        },
    )


def _over_ranks(window: Window, name: str) -> list[Line]:
    """Return the mean over the ranks, and the lowest and highest rank if they differ."""
    said = window.values(name)
    if not said:
        return []
    num_ranks = max(spread.num for _, spread in said)
    lines = [(f"mean of {num_ranks} ranks" if num_ranks > 1 else "value", _means(said))]
    if any(spread.high - spread.low > 1e-3 * abs(spread.mean) for _, spread in said):
        lines.append(("lowest rank", [(step, _finite(spread.low)) for step, spread in said]))
        lines.append(("highest rank", [(step, _finite(spread.high)) for step, spread in said]))
    return lines


def _lags(window: Window, finding: Finding) -> Iterator[Line]:
    """Yield the lags of the late ranks, and the largest lag usual among the others.

    A rank that was not among the few latest counts as not late.
    """
    ranks = engine_facts(finding).get("late_ranks", [])[: MAX_LINES - 1]
    for rank in ranks:
        late = [
            (one.step, next((arrival.lag_s for arrival in one.latest if arrival.rank == rank), 0.0))
            for one in window.calls.arrivals
        ]
        yield f"rank {rank}", [(step, lag * 1e3) for step, lag in late]
    if ranks:
        yield "others, at their worst", [(one.step, one.usual_s * 1e3) for one in window.calls.arrivals]


def _means(said: Iterable[tuple[int, Spread]]) -> list[Point]:
    """Return the points of the mean; a step is not finite if it was not finite on one rank."""
    return [(step, None if spread.num_nonfinite else _finite(spread.mean)) for step, spread in said]


def _distances(window: Window) -> Iterator[Line]:
    """Yield, for each class of tensors in which the ranks differ, the spread of a projection relative to the norm."""
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
    """Return a line for each module: those that the finding names first, then those that changed most."""
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
    """Plot the exponents of the gradients at the last look before the detection; None if there was none."""
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
    """Return the step before which a series must not have ended to say something about the marked step."""
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


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates in the drawing."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the coordinate of a value; on a logarithmic scale, values below the lowest are drawn at the lowest."""
        value = max(value, self.low) if self.is_log else value
        low, high, value = (math.log10(one) if self.is_log else one for one in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.begin + share * (self.end - self.begin), 1)


def figure(plot: Evidence, number: int) -> str:
    """Return one plot as an HTML figure; if it cannot be drawn, only its summary as text."""
    values = plot.values
    try:
        body, height = _body(values)
        legend = _legend(values.get("lines", []))
    except (KeyError, TypeError, ValueError):
        # Written by another version: the words are still there.
        return f"<p>{html.escape(plot.summary)}</p>"
    title, described = html.escape(str(values.get("title", ""))), html.escape(plot.summary)
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="plot{number}t plot{number}d"><title id="plot{number}t">{title}</title>'
        f'<desc id="plot{number}d">{described}</desc>{body}</svg>{legend}</figure>'
    )


def _body(values: dict[str, Any]) -> tuple[str, int]:
    if values.get("heat"):
        return _heat(values)
    if values.get("shares"):
        return _shares(values["shares"])
    return (_bars(values) if values.get("bars") else _lines(values)), HEIGHT


def sparkline(plot: Evidence, width: int = 32) -> str:
    """Draw a plot in one line of block letters; `!` stands for values that were not finite, `|` before the onset.

    Shown are the first line, the bars, the shares, or the last column of a heat map.
    """
    values = plot.values
    if values.get("heat"):
        ends = [row["values"][-1] for row in values["heat"]["rows"]]
        return sparkline(Evidence(kind=KIND, summary="", values={"log": True, "lines": [{"steps": range(len(ends)), "values": ends}]}), width)  # fmt: skip
    if values.get("shares"):
        return "".join(BARS[min(7, int(8 * part["value"]))] for part in values["shares"])
    if values.get("bars"):
        known: list[float | None] = [float(bar["value"]) for bar in values["bars"]]
    else:
        known = [value for _, value in points_of(values["lines"][0])] if values.get("lines") else []
    onset = _onset_of(values, len(known), min(len(known), width))
    if len(known) > width:
        parts = [known[len(known) * n // width : len(known) * (n + 1) // width] for n in range(width)]
        known = [None if None in part else part[-1] for part in parts]
    finite = [value for value in known if value is not None]
    if not finite:
        return _marked(GAP * len(known), onset)
    if values.get("log") and max(finite) > 0:
        floor = min((value for value in finite if value > 0), default=1.0)
        known = [None if value is None else math.log10(max(value, floor)) for value in known]
        finite = [value for value in known if value is not None]
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return _marked("".join(GAP if value is None else BARS[min(7, int(8 * (value - low) / span))] for value in known), onset)  # fmt: skip


def _onset_of(values: Mapping[str, Any], num: int, width: int) -> int:
    """The letter of a line's that shows its onset; 0: there is none, or nothing before it."""
    steps = [step for step, _ in points_of(values["lines"][0])] if values.get("lines") and "mark" in values else []
    place = next((place for place, step in enumerate(steps) if step >= values["mark"]), 0)
    return place * width // num if num else 0


def _marked(text: str, onset: int) -> str:
    return f"{text[:onset]}|{text[onset:]}" if onset else text


def ticks(low: float, high: float, num: int = NUM_TICKS) -> list[float]:
    """Return round numbers within a range, at distances of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float, num: int = NUM_TICKS) -> list[float]:
    """Return at most `num` powers of ten within a range, evenly spaced."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first + 1) / num)))]


def _lines(values: dict[str, Any]) -> str:
    drawn = [points_of(line) for line in values["lines"]]
    finite = [value for points in drawn for _, value in points if value is not None]
    steps = [step for points in drawn for step, _ in points] + [values["mark"]]
    is_log = bool(values.get("log")) and max(finite, default=0.0) > 0
    shown = [value for value in finite if value > 0] if is_log else finite
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    if not is_log and high > low:
        low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    across = Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    upwards = Scale(low, high, HEIGHT - BOTTOM, TOP + 8, is_log=is_log)
    parts = [*_axes(across, upwards), *_mark(across.at(values["mark"]), f"step {int(values['mark'])}")]
    # The first line is drawn last, over the others.
    for number, points in reversed(list(enumerate(drawn))):
        parts += _line(points, _look(number, values["lines"][number]), across, upwards)
    return "".join(parts)


def _axes(across: Scale, upwards: Scale) -> Iterator[str]:
    places = decades(upwards.low, upwards.high) if upwards.is_log else []
    yield from _grid(upwards, places if len(places) > 1 else ticks(upwards.low, upwards.high))
    for step in sorted({int(value) for value in ticks(across.low, across.high, 8) if value == int(value)}):
        x, y = across.at(step), HEIGHT - BOTTOM
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{y}" y2="{y + 4}"/>'
        yield f'<text x="{x}" y="{y + 18}" text-anchor="middle">{step}</text>'
    yield f'<text x="{LEFT - 8}" y="{HEIGHT - BOTTOM + 18}" text-anchor="end">step</text>'


def _grid(upwards: Scale, values: Iterable[float]) -> Iterator[str]:
    for value in values:
        y = upwards.at(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{_short(value)}</text>'


def _mark(x: float, label: str, *, is_bound: bool = False) -> Iterator[str]:
    """Draw a dashed vertical line. A step's label is on the inner side, that of a dtype's bound on the outer one."""
    is_before = x < WIDTH / 2 if is_bound else x > WIDTH / 2
    side, shift = ("end", -6) if is_before else ("start", 6)
    yield f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP - 12}" y2="{HEIGHT - BOTTOM}"/>'
    yield f'<text class="marked" x="{x + shift}" y="{TOP - 8}" text-anchor="{side}">{html.escape(label)}</text>'


def _look(number: int, line: dict[str, Any]) -> str:
    """Return the CSS class of a line; a class also works on pages that forbid inline styles."""
    return "side" if line["name"] in SIDES else f"c{number % 8}"


def _line(points: Sequence[Point], look: str, across: Scale, upwards: Scale) -> Iterator[str]:
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
            x, y = across.at(step), TOP + 2
            yield f'<path class="cross" d="M{x - 4},{y - 4}l8,8m0,-8l-8,8"/>'
        else:
            runs[-1].append((across.at(step), upwards.at(value)))
    for run in runs:
        if len(run) == 1:
            yield f'<circle class="dot {look}" cx="{run[0][0]}" cy="{run[0][1]}" r="3"/>'
        elif run:
            yield f'<polyline class="line {look}" points="{" ".join(f"{x},{y}" for x, y in run)}"/>'


def _bars(values: dict[str, Any]) -> str:
    bars = values["bars"]
    across = Scale(0, len(bars), LEFT, WIDTH - RIGHT)
    upwards = Scale(0, max(bar["value"] for bar in bars) or 1, HEIGHT - BOTTOM, TOP + 8)
    parts = [*_grid(upwards, ticks(0, upwards.high, 4))]
    every = max(1, math.ceil(len(bars) / 10))
    for place, bar in enumerate(bars):
        x, end, y = across.at(place), across.at(place + 1), upwards.at(bar["value"])
        parts.append(
            f'<rect class="bar" x="{x + 1}" y="{y}" width="{round(end - x - 2, 1)}" height="{round(HEIGHT - BOTTOM - y, 1)}"/>'
        )
        if place % every == 0:
            label = html.escape(str(bar["label"]))
            parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    for edge in values.get("edges", []):
        if 0 <= edge["at"] <= len(bars):
            parts += _mark(across.at(edge["at"]), str(edge["label"]), is_bound=True)
    return "".join(parts)


HEAT_LEFT, HEAT_ROW, NUM_HEATS = 230, 14, 7
"""Geometry of a heat map, and the number of its colour classes: `h0` to `h6`, from the smallest to the largest
value."""


def _heat(values: dict[str, Any]) -> tuple[str, int]:
    """Draw a heat map with a row for each layer and a column for each step.

    Values that were not finite have the mark's colour, values of exactly zero have none.
    """
    steps, rows = values["heat"]["steps"], values["heat"]["rows"]
    sizes = [math.log10(value) for row in rows for value in row["values"] if value]
    low, high = (min(sizes), max(sizes)) if sizes else (0.0, 0.0)
    across = Scale(0, len(steps), HEAT_LEFT, WIDTH - RIGHT)
    parts = []
    for number, row in enumerate(rows):
        y = TOP + number * HEAT_ROW
        name = str(row["name"])
        shown = html.escape(name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}")
        parts.append(f'<text x="{HEAT_LEFT - 8}" y="{y + 11}" text-anchor="end">{shown}</text>')
        for place, value in enumerate(row["values"]):
            x, end = across.at(place), across.at(place + 1)
            look = _warmth(value, low, high)
            if look:
                parts.append(
                    f'<rect class="{look}" x="{x}" y="{y}" width="{round(end - x, 1)}" height="{HEAT_ROW - 1}"/>'
                )
    bottom = TOP + len(rows) * HEAT_ROW
    at = next((place for place, step in enumerate(steps) if step >= values["mark"]), len(steps))
    x = across.at(at)
    side, shift = ("end", -6) if x > WIDTH / 2 else ("start", 6)
    parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP - 12}" y2="{bottom}"/>')
    parts.append(
        f'<text class="marked" x="{x + shift}" y="{TOP - 8}" text-anchor="{side}">step {int(values["mark"])}</text>'
    )
    every = max(1, math.ceil(len(steps) / 6))
    parts += [
        f'<text x="{across.at(place + 0.5)}" y="{bottom + 16}" text-anchor="middle">{int(steps[place])}</text>'
        for place in range(0, len(steps), every)
    ]
    scale = f"from {_short(10**low)} (pale) to {_short(10**high)} (dark); red: NaN, Inf or not logged"
    parts.append(f'<text x="{HEAT_LEFT}" y="{bottom + 34}">{html.escape(scale)}</text>')
    return "".join(parts), bottom + 44


MAX_NAME = 34


def _warmth(value: float | None, low: float, high: float) -> str:
    """Return the CSS class of a cell's colour; empty if its value is exactly zero."""
    if value is None:
        return "hot"
    if value <= 0:
        return ""
    share = (math.log10(value) - low) / (high - low) if high > low else 0.5
    return f"h{min(NUM_HEATS - 1, int(NUM_HEATS * share))}"


def _shares(parts: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    across = Scale(0.0, 1.0, HEAT_LEFT, WIDTH - RIGHT - 60)
    drawn = []
    for number, part in enumerate(parts):
        y, end = 8 + number * 24, across.at(min(1.0, max(0.0, part["value"])))
        name = str(part["name"])
        shown = html.escape(name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}")
        drawn.append(f'<text x="{HEAT_LEFT - 8}" y="{y + 14}" text-anchor="end">{shown}</text>')
        drawn.append(f'<rect class="bar" x="{HEAT_LEFT}" y="{y}" width="{max(1.0, round(end - HEAT_LEFT, 1))}" height="18"/>')  # fmt: skip
        drawn.append(f'<text x="{end + 8}" y="{y + 14}">{part["value"]:.1%}</text>')
    return "".join(drawn), 16 + 24 * len(parts)


def _legend(lines: Sequence[dict[str, Any]]) -> str:
    entries = [
        f'<span><i class="{_look(number, line)}"></i>{html.escape(_name(line))}</span>'
        for number, line in enumerate(lines)
        if len(lines) > 1 and line["name"] not in SIDES[1:]
    ]
    if any(None in line["values"] for line in lines):
        entries.append('<span class="gap">&times; NaN or Inf</span>')
    return f'<div class="legend">{"".join(entries)}</div>' if entries else ""


def _name(line: dict[str, Any]) -> str:
    return "lowest and highest rank" if line["name"] in SIDES else str(line["name"])


def _short(value: float) -> str:
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e+").replace("e+", "e")


def points_of(line: Mapping[str, Any]) -> list[Point]:
    """Return the points of a stored line."""
    return list(zip(line["steps"], line["values"], strict=False))


STYLE = """
:root { --mark: #cf222e; --s0: #0969da; --s1: #bc4c00; --s2: #1b7c83; --s3: #1a7f37; --s4: #9a6700; --s5: #8250df; --s6: #bf3989; --s7: #57606a; }
@media (prefers-color-scheme: dark) { :root { --mark: #ff7b72; --s0: #58a6ff; --s1: #ffa657; --s2: #39c5cf; --s3: #3fb950; --s4: #d29922; --s5: #bc8cff; --s6: #f778ba; --s7: #b1bac4; } }
figure { margin: 1rem 0 1.6rem; } figcaption { font-weight: 600; } svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--faint); } svg .grid { stroke: var(--line); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; } svg .mark { stroke: var(--mark); stroke-width: 1.5; stroke-dasharray: 4 3; }
svg .side { stroke-width: 1.2; stroke-dasharray: 5 3; } svg .cross { stroke: var(--mark); stroke-width: 2; fill: none; } svg text.marked { fill: var(--mark); font-weight: 600; }
svg .bar { fill: var(--s0); } .c0 { --c: var(--s0); } .c1 { --c: var(--s1); } .c2 { --c: var(--s2); } .c3 { --c: var(--s3); }
.c4 { --c: var(--s4); } .c5 { --c: var(--s5); } .c6 { --c: var(--s6); } .c7 { --c: var(--s7); } .side { --c: var(--faint); }
svg .line { stroke: var(--c); } svg .dot { fill: var(--c); } .legend i { background: var(--c); } .legend .gap { color: var(--mark); }
svg .h0 { fill: #e6f0fa; } svg .h1 { fill: #c3dcf3; } svg .h2 { fill: #93bfe8; } svg .h3 { fill: #5f9cd8; } svg .h4 { fill: #3678be; } svg .h5 { fill: #1b559a; } svg .h6 { fill: #0a3069; } svg .hot { fill: var(--mark); }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; color: var(--faint); font-size: .85rem; }
.legend i { display: inline-block; width: 1.1em; height: .25em; margin-right: .4em; vertical-align: middle; }
""".strip()
"""CSS of the plots; it uses the page's own `--ink`, `--faint` and `--line`."""
