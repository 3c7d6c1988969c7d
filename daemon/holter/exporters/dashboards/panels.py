"""The kinds of panels in the style that all dashboards share: a card (common to all panels), queries, and a way of drawing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as choices
from grafana_foundation_sdk.models.common import DataSourceRef, TableAutoCellOptions
from grafana_foundation_sdk.models.dashboard import (
    DashboardSpecialValueMapOptions,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    SpecialValueMap,
    SpecialValueMatch,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
CRITICAL, WARNING, INFO, FINE, PLAIN = "red", "orange", "blue", "green", "text"
SEVERITIES = {"critical": CRITICAL, "warning": WARNING, "info": INFO}
LEVELS = {"3": ("critical", CRITICAL), "2": ("warning", WARNING), "1": ("info", INFO)}
"""Name and colour of each number that `promql.severe` returns."""

Panel = bargauge.Panel | heatmap.Panel | stat.Panel | statetimeline.Panel | table.Panel | timeseries.Panel
_Kind = TypeVar("_Kind", bargauge.Panel, heatmap.Panel, stat.Panel, statetimeline.Panel, table.Panel, timeseries.Panel)


@dataclass(frozen=True)
class PanelLink:
    """A link that a click on a panel follows."""

    title: str
    url: str


@dataclass(frozen=True)
class Card:
    """What every panel has, whatever its kind."""

    id: int
    """Id within the dashboard. It is never reused for another panel, because alerts link to it."""
    title: str
    text: str
    unit: str
    width: int = 8
    """Width in columns of 24."""
    height: int = 8
    limits: tuple[tuple[float, str], ...] = ()
    """(value, colour): the colour from this value on. Only verdicts or settings of holter's own serve as limits,
    because a dashboard judges nothing."""
    base: str = PLAIN
    """Colour below all limits."""
    link: PanelLink | None = None


@dataclass(frozen=True)
class Query:
    """One query, with the name of each of its series."""

    expr: str
    legend: str = ""


def with_card(panel: _Kind, card: Card) -> _Kind:
    """Apply a card to a panel and return the panel."""
    panel.id(card.id).title(card.title).description(card.text).unit(card.unit).datasource(SOURCE)
    panel.span(card.width).height(card.height)
    steps = [Threshold(None, card.base), *(Threshold(value, colour) for value, colour in card.limits)]
    panel.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    if card.link is not None:
        panel.data_links([_link(card.link)])
    return panel


def to_target(number: int, query: Query) -> prometheus.Dataquery:
    """Return a query as a target of the panel; the first one is A."""
    made = prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(query.expr).datasource(SOURCE)
    return made.legend_format(query.legend or "__auto")


def _link(link: PanelLink) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(link.title).url(link.url).target_blank(target_blank=True)


AGGREGATES = {"mean": "blue", "min": "light-blue", "max": "purple"}
"""Colours of the aggregates over ranks."""
LINEAR, LOG = choices.ScaleDistribution.LINEAR, choices.ScaleDistribution.LOG
FROM_ZERO = choices.ScaleDistribution.SYMLOG
"""A logarithmic scale that allows counts of 0."""


def lines(
    card: Card,
    *queries: Query,
    scale: choices.ScaleDistribution = LINEAR,
    is_stacked: bool = False,
    colours: Mapping[str, str] | None = None,
) -> timeseries.Panel:
    """Draw series over time; stacked ones are shares of 1. `colours` maps known series names to colours."""
    panel = with_card(timeseries.Panel(), card)
    for number, query in enumerate(queries):
        panel.with_target(to_target(number, query).range())
    panel.line_width(1).fill_opacity(60 if is_stacked else 6).show_points(choices.VisibilityMode.AUTO)
    panel.legend(_legend(["lastNotNull", "max"])).tooltip(_tooltip())
    if scale is not LINEAR:
        panel.scale_distribution(common.ScaleDistributionConfig().type(scale).log(10).linear_threshold(1))
    if is_stacked:
        panel.stacking(common.StackingConfig().mode(choices.StackingMode.NORMAL).group("A")).min(0).max(1)
    # Grafana's own palette begins with green, yellow and red, which would look like verdicts.
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.SHADES).fixed_color("blue"))
    for name, colour in (AGGREGATES if colours is None else colours).items():
        fixed = {"mode": FieldColorModeId.FIXED, "fixedColor": colour}
        panel.override_by_name(name, [DynamicConfigValue("color", fixed)])
    if card.limits:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(choices.GraphThresholdsStyleMode.DASHED))
    return panel


def number(card: Card, query: Query, nan: tuple[str, str] | None = None) -> stat.Panel:
    """Show one current number; `nan` is the text and colour shown for NaN."""
    panel = with_card(stat.Panel(), card).with_target(to_target(0, query).range())
    panel.graph_mode(choices.BigValueGraphMode.AREA).reduce_options(_last())
    panel.color_mode(choices.BigValueColorMode.VALUE).text_mode(choices.BigValueTextMode.VALUE)
    if nan is not None:
        shown = ValueMappingResult(text=nan[0], color=nan[1])
        panel.mappings([SpecialValueMap(DashboardSpecialValueMapOptions(SpecialValueMatch.NA_N, shown))])
    return panel


def bars(card: Card, query: Query) -> bargauge.Panel:
    """Draw a bar with the current value of each series."""
    panel = with_card(bargauge.Panel(), card).with_target(to_target(0, query).instant())
    panel.orientation(choices.VizOrientation.HORIZONTAL).display_mode(choices.BarGaugeDisplayMode.BASIC)
    return panel.reduce_options(_last()).min(0).value_mode(choices.BarGaugeValueMode.TEXT)


def states(card: Card, query: Query, names: Mapping[str, tuple[str, str]]) -> statetimeline.Panel:
    """Draw a row for each series, coloured by its value over time; `names`: value -> (text, colour)."""
    panel = with_card(statetimeline.Panel(), card).with_target(to_target(0, query).range())
    panel.mappings(_mappings(names)).row_height(0.8).merge_values(merge_values=True).fill_opacity(80).line_width(0)
    panel.show_value(choices.VisibilityMode.NEVER).legend(_legend([])).tooltip(_tooltip())
    return panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))


def heat(card: Card, query: Query, *, scheme: str = "Blues", is_histogram: bool = False) -> heatmap.Panel:
    """Draw a row for each series, or each bucket of a histogram, over time, with the value as colour."""
    target = to_target(0, query).range()
    panel = with_card(heatmap.Panel(), card)
    panel.with_target(target.format(PromQueryFormat.HEATMAP) if is_histogram else target)
    panel.calculate(calculate=False).cell_gap(1).show_legend()
    if not is_histogram:
        # Otherwise names that are numbers would be taken for upper bounds.
        panel.rows_frame(heatmap.RowsHeatmapOptions().layout(choices.HeatmapCellLayout.UNKNOWN))
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme(scheme)
        .scale(HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
        .reverse(reverse=False)
        .fill("dark-blue")
    )
    panel.y_axis(heatmap.YAxisConfig().unit("s" if is_histogram else "none"))
    panel.cell_values(heatmap.CellValues().unit(card.unit))
    panel.tooltip(
        heatmap.HeatmapTooltip().mode(choices.TooltipDisplayMode.SINGLE).show_color_scale(show_color_scale=True)
    )
    return panel


def _mappings(names: Mapping[str, tuple[str, str]]) -> list[ValueMapping]:
    options = {
        value: ValueMappingResult(text=text, color=colour, index=index)
        for index, (value, (text, colour)) in enumerate(names.items())
    }
    return [ValueMap(options=options)]


def _legend(calculations: list[str]) -> common.VizLegendOptions:
    legend = common.VizLegendOptions().display_mode(choices.LegendDisplayMode.LIST).calcs(calculations)
    return legend.placement(choices.LegendPlacement.BOTTOM).show_legend(show_legend=True)


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(choices.TooltipDisplayMode.MULTI).sort(choices.SortOrder.DESCENDING)


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(values=False).fields("")


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    unit: str = ""
    colours: Mapping[str, str] | None = None
    """Colour of the text for each value."""
    link: PanelLink | None = None


def rows(card: Card, queries: tuple[Query, ...], columns: Mapping[str, Column]) -> table.Panel:
    """Build a table from queries of the current moment, joined by the labels they share.

    `columns` are keyed by field: a label's name, `Value #A` for the first query's value, or `Value` if there is only
    one query. Rows are sorted by the first column.
    """
    panel = with_card(table.Panel(), card).show_header(show_header=True).cell_options(TableAutoCellOptions())
    panel.sort_by([common.TableSortByFieldState().display_name(next(iter(columns.values())).title)])
    for number, query in enumerate(queries):
        panel.with_target(to_target(number, query).instant().format(PromQueryFormat.TABLE))
    values = [f"Value #{chr(ord('A') + number)}" for number in range(len(queries))] if len(queries) > 1 else ["Value"]
    assert all(name in values for name in columns if name.startswith("Value")), "Grafana names the values otherwise"
    organized = {
        "excludeByName": {name: True for name in ("Time", *values) if name not in columns},
        "indexByName": {name: index for index, name in enumerate(columns)},
        "renameByName": {name: column.title for name, column in columns.items()},
    }
    panel.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(DataTransformerConfig(id_val="organize", options=organized))
    for column in columns.values():
        if properties := _properties(column):
            panel.override_by_name(column.title, properties)
    return panel


def _properties(column: Column) -> list[DynamicConfigValue]:
    found = []
    if column.unit:
        found.append(DynamicConfigValue("unit", column.unit))
    if column.colours is not None:
        options = {value: ValueMappingResult(color=colour) for value, colour in column.colours.items()}
        found.append(DynamicConfigValue("mappings", [ValueMap(options=options)]))
        found.append(DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
    if column.link is not None:
        link = {"title": column.link.title, "url": column.link.url, "targetBlank": True}
        found.append(DynamicConfigValue("links", [link]))
    return found
