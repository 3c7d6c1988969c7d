"""What every panel has, whatever its kind: a number for ever, a title, a sentence, a unit, a place; and what it asks Prometheus."""

from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models.common import DataSourceRef
from grafana_foundation_sdk.models.dashboard import Threshold, ThresholdsMode

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
CRITICAL, WARNING, INFO, FINE, PLAIN = "red", "orange", "blue", "green", "text"
SEVERITIES = {"critical": CRITICAL, "warning": WARNING, "info": INFO}
LEVELS = {"3": ("critical", CRITICAL), "2": ("warning", WARNING), "1": ("info", INFO)}
"""As `promql.severe` tells them."""

Panel = bargauge.Panel | heatmap.Panel | stat.Panel | statetimeline.Panel | table.Panel | timeseries.Panel
_Kind = TypeVar("_Kind", bargauge.Panel, heatmap.Panel, stat.Panel, statetimeline.Panel, table.Panel, timeseries.Panel)


@dataclass(frozen=True)
class PanelLink:
    """To where a click leads."""

    title: str
    url: str


@dataclass(frozen=True)
class Card:
    """A panel's own facts."""

    id: int
    """Never given to another panel of the same dashboard: alerts link to it."""
    title: str
    text: str
    unit: str
    width: int = 8
    """Of 24 columns."""
    height: int = 8
    limits: tuple[tuple[float, str], ...] = ()
    """(from this value on, colour). Only where holter's own verdict or setting is the limit: nothing is judged here a second time."""
    base: str = PLAIN
    """Colour below every limit."""
    link: PanelLink | None = None


@dataclass(frozen=True)
class Query:
    """One question, and how each of its series is called."""

    expr: str
    legend: str = ""


def dressed(panel: _Kind, card: Card) -> _Kind:
    """The panel with its card."""
    panel.id(card.id).title(card.title).description(card.text).unit(card.unit).datasource(SOURCE)
    panel.span(card.width).height(card.height)
    steps = [Threshold(None, card.base), *(Threshold(value, colour) for value, colour in card.limits)]
    panel.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    if card.link is not None:
        panel.data_links([_link(card.link)])
    return panel


def asked(number: int, query: Query) -> prometheus.Dataquery:
    """The question as Prometheus gets it; the first is A."""
    made = prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(query.expr).datasource(SOURCE)
    return made.legend_format(query.legend or "__auto")


def _link(link: PanelLink) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(link.title).url(link.url).target_blank(target_blank=True)
