"""Panels of a moment: bars and tables."""

from typing import Any

from svg_canvas import EDGE, GRID, NAMED, PALETTE, TEXT, Box, Canvas, clipped, shown
from svg_parts import Answer, Span, limit_colour, properties_of, unit_of


def bars(canvas: Canvas, box: Box, panel: dict[str, Any], answers: list[Answer], _: Span) -> None:
    """The longest first."""
    ordered = sorted(answers, key=lambda answer: -answer.points[-1][1])
    high = ordered[0].points[-1][1] or 1.0
    height = min(box.h / len(ordered), 30)
    label = min(max(len(answer.name) for answer in ordered) * 5.8 + 10, box.w * 0.4)
    for index, answer in enumerate(ordered):
        value, y = answer.points[-1][1], box.y + index * height
        colour = limit_colour(panel, value)
        track = Box(box.x + label, y + height * 0.15, box.w - label - 70, height * 0.7)
        canvas.text(box.x + label - 8, y + height / 2 + 4, clipped(answer.name, label - 8, 10.5), 10.5, TEXT, "end")
        canvas.rect(track, GRID)
        canvas.rect(
            Box(track.x, track.y, track.w * value / high, track.h),
            PALETTE[2] if colour == TEXT else colour,
            opacity=0.85,
        )
        canvas.text(box.x + box.w, y + height / 2 + 4, shown(value, unit_of(panel)), 11, colour, "end bold")


def table(canvas: Canvas, box: Box, panel: dict[str, Any], answers: list[Answer], _: Span) -> None:
    """Columns and order as the panel's transformations say."""
    organized = panel["transformations"][-1]["options"]
    fields = sorted(organized["renameByName"], key=lambda name: organized["indexByName"][name])
    titles = [organized["renameByName"][name] for name in fields]
    rows = sorted(_merged(answers), key=lambda row: str(row.get(fields[0], "")))
    lengths = [
        max(len(title), *(min(len(_cell(panel, title, row.get(name, ""))), 44) for row in rows)) + 3
        for name, title in zip(fields, titles, strict=True)
    ]
    widths = [box.w * length / sum(lengths) for length in lengths]
    x = box.x
    for title, width in zip(titles, widths, strict=True):
        canvas.text(x, box.y + 14, title, 11, "#6e9fff", "bold")
        x += width
    canvas.line((box.x, box.y + 22), (box.x + box.w, box.y + 22), EDGE)
    for index, row in enumerate(rows[: int((box.h - 24) // 24)]):
        x, y = box.x, box.y + 40 + index * 24
        for name, title, width in zip(fields, titles, widths, strict=True):
            canvas.text(
                x,
                y,
                clipped(_cell(panel, title, row.get(name, "")), width),
                11,
                _cell_colour(panel, title, row.get(name, "")),
            )
            x += width
        canvas.line((box.x, y + 8), (box.x + box.w, y + 8), GRID)


def _merged(answers: list[Answer]) -> list[dict[str, Any]]:
    """As Grafana's transformation `merge`: rows that agree in the labels they share are one."""
    rows: list[dict[str, Any]] = []
    is_alone = len({answer.ref for answer in answers}) == 1
    for answer in answers:
        name = "Value" if is_alone else f"Value #{answer.ref}"
        alike = (row for row in rows if all(row.get(label, value) == value for label, value in answer.labels.items()))
        row = next((row for row in alike if name not in row), None)
        if row is None:
            rows.append(row := {})
        row.update(answer.labels | {name: answer.points[-1][1]})
    return rows


def _cell(panel: dict[str, Any], title: str, value: Any) -> str:
    return (
        shown(value, properties_of(panel, title).get("unit", unit_of(panel)))
        if isinstance(value, float)
        else str(value)
    )


def _cell_colour(panel: dict[str, Any], title: str, value: Any) -> str:
    properties = properties_of(panel, title)
    if "links" in properties:
        return "#6e9fff"
    options = properties.get("mappings", [{"options": {}}])[0]["options"]
    return NAMED[options[value]["color"]] if value in options else TEXT
