"""What all drawings of panels need: the answers, the time, and what a panel says of units and colours."""

from dataclasses import dataclass
from typing import Any

from svg_canvas import NAMED, TEXT, Box

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Answer:
    """One series: what the legend calls it, its labels, its points; one point if the query was of a moment."""

    name: str
    labels: dict[str, str]
    points: Points
    ref: str


@dataclass(frozen=True)
class Span:
    """The time that is shown."""

    start_s: float
    end_s: float
    step_s: float
    marks: tuple[tuple[str, float], ...] = ()
    """(colour, when)"""

    def x(self, at_s: float, box: Box) -> float:
        """Where a moment is."""
        return box.x + (at_s - self.start_s) / (self.end_s - self.start_s) * box.w


def limit_colour(panel: dict[str, Any], value: float) -> str:
    """Colour of a value by the panel's limits."""
    colour = TEXT
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = NAMED[step["color"]]
    return colour


def unit_of(panel: dict[str, Any]) -> str:
    """The panel's unit."""
    return str(panel["fieldConfig"]["defaults"]["unit"])


def properties_of(panel: dict[str, Any], title: str) -> dict[str, Any]:
    """What the panel overrides for one field."""
    found = [
        override["properties"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == title
    ]
    return {one["id"]: one["value"] for properties in found for one in properties}


def named(colour: str) -> str:
    """A colour by its name in Grafana, or as it is."""
    return NAMED.get(colour, colour)
