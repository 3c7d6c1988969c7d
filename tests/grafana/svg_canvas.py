"""A picture in SVG, piece by piece, in Grafana's dark colours; and values as people read them."""

import math
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

BACKGROUND, PANEL, EDGE, GRID, TEXT, FAINT = "#111217", "#181b1f", "#2c2f34", "#2a2d33", "#d8d9da", "#8e8f99"
PALETTE = ["#5794f2", "#1f60c4", "#8ab8ff", "#3274d9", "#c0d8ff", "#b877d9", "#8f3bb8", "#ca95e5", "#a352cc", "#deb6f2"]
NAMED = {
    "text": TEXT,
    "transparent": "none",
    "red": "#f2495c",
    "orange": "#ff9830",
    "green": "#73bf69",
    "blue": "#5794f2",
    "semi-dark-red": "#e02f44",
    "semi-dark-orange": "#ff780a",
    "semi-dark-yellow": "#f2cc0c",
    "semi-dark-green": "#56a64b",
    "semi-dark-blue": "#3274d9",
    "semi-dark-purple": "#a352cc",
    "light-blue": "#8ab8ff",
    "super-light-blue": "#c0d8ff",
    "purple": "#b877d9",
    "light-purple": "#ca95e5",
    "super-light-purple": "#deb6f2",
    "dark-purple": "#8f3bb8",
}
SCHEMES = {"Oranges": "#ff9830", "Blues": "#5794f2", "Greens": "#73bf69", "Reds": "#f2495c", "Purples": "#b877d9"}


@dataclass(frozen=True)
class Box:
    """A place in the picture."""

    x: float
    y: float
    w: float
    h: float

    def inset(self, left: float, top: float, right: float, bottom: float) -> "Box":
        """What is left of it."""
        return Box(self.x + left, self.y + top, self.w - left - right, self.h - top - bottom)


@dataclass
class Canvas:
    """Pieces in the order in which they are drawn."""

    pieces: list[str] = field(default_factory=list)

    def rect(self, box: Box, fill: str, stroke: str = "none", radius: float = 0, opacity: float = 1) -> None:
        """A filled box."""
        self.pieces.append(
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{max(box.w, 0):.1f}" height="{max(box.h, 0):.1f}" rx="{radius}" '
            f'fill="{fill}" stroke="{stroke}" fill-opacity="{opacity}"/>'
        )

    def text(self, x: float, y: float, content: str, size: float = 11, fill: str = TEXT, how: str = "") -> None:  # noqa: PLR0917 - as SVG has them
        """`how` are words among start, middle, end, bold."""
        anchor = next((word for word in ("middle", "end") if word in how), "start")
        weight = ' font-weight="600"' if "bold" in how else ""
        self.pieces.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(content)}</text>'
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], stroke: str, dash: str = "") -> None:
        """A straight line."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        (x1, y1), (x2, y2) = start, end
        self.pieces.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dashed}/>')

    def curve(
        self, points: list[tuple[float, float]], stroke: str, down_to: float | None = None, opacity: float = 0.08
    ) -> None:
        """A line through points, filled down to a level if one is given."""
        shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if down_to is not None and points:
            ends = f"{points[-1][0]:.1f},{down_to:.1f} {points[0][0]:.1f},{down_to:.1f}"
            self.pieces.append(f'<polygon points="{shown} {ends}" fill="{stroke}" fill-opacity="{opacity}"/>')
        if len(points) == 1:
            self.pieces.append(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2" fill="{stroke}"/>')
        self.pieces.append(
            f'<polyline points="{shown}" fill="none" stroke="{stroke}" stroke-width="1.4" stroke-linejoin="round"/>'
        )

    def svg(self, width: float, height: float) -> str:
        """The whole picture."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        font = ' font-family="Inter, Helvetica, Arial, sans-serif">'
        return "\n".join([head + font, *self.pieces, "</svg>"]) + "\n"


def clipped(content: str, width: float, size: float = 11) -> str:
    """As much of it as fits."""
    most = max(int(width / (size * 0.55)), 1)
    return content if len(content) <= most else content[: max(most - 1, 1)] + "…"


def shown(value: float, unit: str) -> str:
    """A value with its unit."""
    if math.isnan(value) or math.isinf(value):
        return "NaN" if math.isnan(value) else "∞"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return _seconds(value)
    if unit == "sci":
        return f"{value:.1e}"
    name = {"ops": " ops/s", "cps": " c/s", "percent": " %", "celsius": " °C", "watt": " W", "mbytes": " MiB"}.get(
        unit, ""
    )
    return (f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}") + name


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    for limit, factor, name in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (120, 1, "s"), (7200, 1 / 60, "min")):
        if abs(value) < limit:
            return f"{value * factor:.3g} {name}"
    return f"{value / 3600:.3g} h"


def blend(low: str, high: str, share: float) -> str:
    """A colour between two."""
    share = min(max(share, 0.0), 1.0)
    ends = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (low, high)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends, strict=True))


def ticks(low: float, high: float, *, is_log: bool = False) -> list[float]:
    """Round values between two."""
    if is_log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = max(1, math.ceil((last - first) / 5))
        return [10.0**power for power in range(first, last + every, every)]
    rough = (high - low) / 4 or 1.0
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = math.floor(low / step)
    return [step * number for number in range(first, math.ceil(high / step) + 1)]


def stretches(values: list[tuple[float, float]], gap: float) -> list[list[tuple[float, float]]]:
    """Points that belong together: no NaN, no hole."""
    found: list[list[tuple[float, float]]] = []
    finite = [point for point in values if math.isfinite(point[1])]
    for index, point in enumerate(finite):
        if index == 0 or point[0] - finite[index - 1][0] > gap:
            found.append([])
        found[-1].append(point)
    assert all(a[-1][0] < b[0][0] for a, b in pairwise(found))
    return found
