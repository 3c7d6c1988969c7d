"""Panels as Grafana would draw them, as far as a few lines of SVG can: the same queries, units, colours, limits and places."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from svg_canvas import (
    EDGE,
    FAINT,
    GRID,
    NAMED,
    PALETTE,
    PANEL,
    SCHEMES,
    TEXT,
    Box,
    Canvas,
    blend,
    clipped,
    shown,
    stretches,
    ticks,
)
from svg_lists import bars, table
from svg_parts import Answer, Points, Span, limit_colour, named, properties_of, unit_of

GAP_STEPS = 3.5
"""Holes longer than this many steps are not drawn over."""


def draw(canvas: Canvas, box: Box, panel: dict[str, Any], answers: list[Answer], span: Span) -> None:
    """A panel with its frame and title."""
    canvas.rect(box, PANEL, EDGE, radius=3)
    canvas.text(box.x + 10, box.y + 19, clipped(panel["title"], box.w - 20, 12), 12, TEXT, "bold")
    inner = box.inset(10, 30, 10, 8)
    if not answers:
        canvas.text(box.x + box.w / 2, box.y + box.h / 2 + 8, "No data", 13, FAINT, "middle")
        return
    KINDS[panel["type"]](canvas, inner, panel, answers, span)


def _stat(canvas: Canvas, box: Box, panel: dict[str, Any], answers: list[Answer], span: Span) -> None:
    points = answers[0].points
    finite = [value for _, value in points if math.isfinite(value)]
    last = points[-1][1]
    text, colour = shown(last, unit_of(panel)), limit_colour(panel, last)
    for mapping in panel["fieldConfig"]["defaults"].get("mappings", []) if math.isnan(last) else []:
        text, colour = mapping["options"]["result"]["text"], NAMED[mapping["options"]["result"]["color"]]
    low, high = min(finite, default=0), max(finite, default=1)
    area = box.inset(-9, box.h * 0.55, -9, -7)
    line = [
        (span.x(at, area), area.y + area.h * (1 - 0.85 * (v - low) / ((high - low) or 1)))
        for at, v in points
        if math.isfinite(v)
    ]
    if high > low:
        canvas.curve(line, colour, area.y + area.h, 0.15)
    canvas.text(box.x + box.w / 2, box.y + box.h * 0.5, text, 30, colour, "middle bold")


def _axis_x(canvas: Canvas, box: Box, span: Span) -> None:
    every = next(
        step for step in (5, 10, 15, 30, 60, 120, 300, 600, 3600) if (span.end_s - span.start_s) / step * 62 <= box.w
    )
    at = math.ceil(span.start_s / every) * every
    while at <= span.end_s:
        x = span.x(at, box)
        canvas.line((x, box.y), (x, box.y + box.h), GRID)
        if box.x + 18 < x < box.x + box.w - 18:
            canvas.text(x, box.y + box.h + 13, time.strftime("%H:%M:%S", time.gmtime(at)), 9.5, FAINT, "middle")
        at += every


def _marks(canvas: Canvas, box: Box, span: Span) -> None:
    for colour, at in span.marks:
        x = span.x(at, box)
        canvas.line((x, box.y), (x, box.y + box.h), colour, "3 3")
        canvas.pieces.append(f'<path d="M{x - 4:.1f} {box.y + box.h + 5:.1f} h8 l-4 -6 z" fill="{colour}"/>')


def _legend(canvas: Canvas, box: Box, entries: list[tuple[str, str]]) -> None:
    x, y = box.x, box.y + box.h - 2
    for name, colour in entries:
        width = 16 + len(name) * 5.6 + 10
        if x + width > box.x + box.w:
            canvas.text(x, y, "…", 10, FAINT)
            return
        canvas.rect(Box(x, y - 5, 11, 3), colour)
        canvas.text(x + 15, y, name, 10, TEXT)
        x += width


def _timeseries(canvas: Canvas, box: Box, panel: dict[str, Any], answers: list[Answer], span: Span) -> None:
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    kind = custom.get("scaleDistribution", {}).get("type", "linear")
    is_stacked = custom.get("stacking", {}).get("mode") == "normal"
    lines = _stacked(answers) if is_stacked else [answer.points for answer in answers]
    limits = [
        one["value"] for one in panel["fieldConfig"]["defaults"]["thresholds"]["steps"] if one["value"] is not None
    ]
    scale = _scale([value for points in lines for _, value in points] + limits, "stacked" if is_stacked else kind)
    plot = box.inset(52, 2, 4, 36)
    colours = [_series_colour(panel, answer, index) for index, answer in enumerate(answers)]
    _axis_x(canvas, plot, span)
    for value in scale.ticks:
        canvas.line((plot.x, scale.y(value, plot)), (plot.x + plot.w, scale.y(value, plot)), GRID)
        canvas.text(plot.x - 6, scale.y(value, plot) + 3.5, shown(value, unit_of(panel)), 9.5, FAINT, "end")
    for index in reversed(range(len(lines))):
        drawable = [(at, value) for at, value in lines[index] if value > 0 or kind != "log"]
        for points in stretches(drawable, span.step_s * GAP_STEPS):
            places = [(span.x(at, plot), scale.y(value, plot)) for at, value in points]
            canvas.curve(places, colours[index], plot.y + plot.h, 1 if is_stacked else 0.06)
    for limit in limits:
        canvas.line(
            (plot.x, scale.y(limit, plot)), (plot.x + plot.w, scale.y(limit, plot)), limit_colour(panel, limit), "6 4"
        )
    _marks(canvas, plot, span)
    _legend(
        canvas, box, [(_entry(answer, unit_of(panel)), colour) for answer, colour in zip(answers, colours, strict=True)]
    )


@dataclass(frozen=True)
class Scale:
    """The vertical axis."""

    kind: str
    ticks: list[float]

    def y(self, value: float, box: Box) -> float:
        """Where a value is."""
        low, high = self._place(self.ticks[0]), self._place(self.ticks[-1])
        return box.y + box.h * (1 - (self._place(value) - low) / (high - low))

    def _place(self, value: float) -> float:
        return {"log": lambda: math.log10(value), "symlog": lambda: math.log10(1 + value)}.get(
            self.kind, lambda: value
        )()


def _scale(values: list[float], kind: str) -> Scale:
    finite = [value for value in values if math.isfinite(value) and (value > 0 or kind != "log")]
    low, high = min(finite, default=0.1 if kind == "log" else 0.0), max(finite, default=1.0)
    if kind == "stacked":
        return Scale("linear", [0.0, 0.5, 1.0])
    if kind == "log":
        return Scale(kind, ticks(low, high * 1.001, is_log=True))
    if kind == "symlog":
        return Scale(kind, [0.0, *ticks(1.0, max(high, 10.0), is_log=True)])
    if 0 <= low < 0.7 * high:
        low = 0.0
    return Scale(kind, ticks(low, high if high > low else low + 1))


def _entry(answer: Answer, unit: str) -> str:
    return f"{clipped(answer.name, 170, 10)}: {shown(answer.points[-1][1], unit)}"


def _stacked(answers: list[Answer]) -> list[Points]:
    sums: dict[float, float] = {}
    found = []
    for answer in answers:
        for at, value in answer.points:
            sums[at] = sums.get(at, 0.0) + value
        found.append([(at, sums[at]) for at, _ in answer.points])
    return found


def _series_colour(panel: dict[str, Any], answer: Answer, index: int) -> str:
    fixed = properties_of(panel, answer.name).get("color", {}).get("fixedColor")
    return PALETTE[index % len(PALETTE)] if fixed is None else named(fixed)


def _heatmap(canvas: Canvas, box: Box, panel: dict[str, Any], answers: list[Answer], span: Span) -> None:
    is_histogram = panel["targets"][0]["format"] == "heatmap" if "format" in panel["targets"][0] else False
    rows = sorted(_buckets(answers) if is_histogram else answers, key=lambda answer: float(answer.name))
    high = max((value for row in rows for _, value in row.points if math.isfinite(value)), default=0) or 1.0
    colour, dark = SCHEMES[panel["options"]["color"]["scheme"]], "#202329"
    plot = box.inset(52, 2, 4, 36)
    height = plot.h / len(rows)
    every = max(1, math.ceil(len(rows) / (plot.h / 12)))
    _axis_x(canvas, plot, span)
    for index, row in enumerate(rows):
        y = plot.y + plot.h - (index + 1) * height
        if index % every == 0:
            name = shown(float(row.name), "s") if is_histogram else row.name
            canvas.text(plot.x - 6, y + height / 2 + 3.5, name, 9.5, FAINT, "end")
        canvas.rect(Box(plot.x, y + 0.5, plot.w, height - 1), dark, opacity=0.6)
        fills = [(at, round(24 * math.sqrt(max(value, 0) / high))) for at, value in row.points if math.isfinite(value)]
        for start, end, level in _runs(fills, span):
            if level:
                left = max(span.x(start, plot), plot.x)
                canvas.rect(Box(left, y + 0.5, span.x(end, plot) - left, height - 1), blend(dark, colour, level / 24))
    _marks(canvas, plot, span)
    for index in range(60):
        canvas.rect(Box(plot.x + index * 2, box.y + box.h - 9, 2, 7), blend(dark, colour, math.sqrt(index / 59)))
    canvas.text(plot.x - 6, box.y + box.h - 2, "0", 9.5, FAINT, "end")
    canvas.text(plot.x + 126, box.y + box.h - 2, shown(high, unit_of(panel)), 9.5, FAINT)


def _buckets(answers: list[Answer]) -> list[Answer]:
    """Cumulative buckets as what lies in each, as Grafana's heat map takes them."""
    ordered = sorted(answers, key=lambda answer: float(answer.name))
    below: dict[float, float] = {}
    found = []
    for answer in ordered:
        found.append(Answer(answer.name, {}, [(at, value - below.get(at, 0.0)) for at, value in answer.points], ""))
        below = dict(answer.points)
    used = [index for index, answer in enumerate(found) if any(value > 0 for _, value in answer.points)] or [0]
    finite = [answer for answer in found[: max(used) + 1] if math.isfinite(float(answer.name))]
    return finite[max(min(used) - 1, 0) :]


def _state_timeline(canvas: Canvas, box: Box, panel: dict[str, Any], answers: list[Answer], span: Span) -> None:
    names = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    label = min(max(len(answer.name) for answer in answers) * 5.6 + 8, box.w * 0.45)
    plot = box.inset(label, 2, 4, 36)
    height = min(plot.h / len(answers), 44)
    _axis_x(canvas, plot, span)
    for index, answer in enumerate(answers):
        y = plot.y + index * height
        canvas.text(plot.x - 6, y + height / 2 + 3.5, clipped(answer.name, label - 6, 10), 10, TEXT, "end")
        for start, end, value in _runs(answer.points, span):
            known = names.get(f"{value:g}")
            if known is not None:
                left = max(span.x(start, plot), plot.x)
                canvas.rect(
                    Box(left, y + height * 0.12, span.x(end, plot) - left, height * 0.76), named(known["color"])
                )
    _marks(canvas, plot, span)
    seen = {f"{value:g}" for answer in answers for _, value in answer.points}
    _legend(canvas, box, [(known["text"], named(known["color"])) for value, known in names.items() if value in seen])


def _runs(points: list[tuple[float, Any]], span: Span) -> list[tuple[float, float, Any]]:
    """(from, to, value) of neighbours that are equal; a point stands for the step before it."""
    found: list[tuple[float, float, Any]] = []
    for at, value in points:
        start = at - span.step_s
        if found and found[-1][2] == value and start - found[-1][1] < span.step_s / 2:
            start = found.pop()[0]
        found.append((start, at, value))
    return found


KINDS: dict[str, Callable[[Canvas, Box, dict[str, Any], list[Answer], Span], None]] = {
    "stat": _stat,
    "timeseries": _timeseries,
    "heatmap": _heatmap,
    "state-timeline": _state_timeline,
    "bargauge": bars,
    "table": table,
}
