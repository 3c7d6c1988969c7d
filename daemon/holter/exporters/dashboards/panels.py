"""The kinds of panels that show time or a number, each in the one style that all dashboards share."""

from collections.abc import Mapping

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, stat, statetimeline, timeseries
from grafana_foundation_sdk.models import common as choices
from grafana_foundation_sdk.models.dashboard import (
    DashboardSpecialValueMapOptions,
    DynamicConfigValue,
    FieldColorModeId,
    SpecialValueMap,
    SpecialValueMatch,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from holter.exporters.dashboards.card import Card, Query, asked, dressed

LINEAR, LOG = choices.ScaleDistribution.LINEAR, choices.ScaleDistribution.LOG
FROM_ZERO = choices.ScaleDistribution.SYMLOG
"""Logarithmic for counts that may be 0."""


def lines(
    card: Card,
    *queries: Query,
    scale: choices.ScaleDistribution = LINEAR,
    is_stacked: bool = False,
    colours: Mapping[str, str] | None = None,
) -> timeseries.Panel:
    """Series over time; stacked ones are shares of 1. `colours` of those whose names are known."""
    panel = dressed(timeseries.Panel(), card)
    for number, query in enumerate(queries):
        panel.with_target(asked(number, query).range())
    panel.line_width(1).fill_opacity(60 if is_stacked else 6).show_points(choices.VisibilityMode.AUTO)
    panel.legend(_legend(["lastNotNull", "max"])).tooltip(_tooltip())
    if scale is not LINEAR:
        panel.scale_distribution(common.ScaleDistributionConfig().type(scale).log(10).linear_threshold(1))
    if is_stacked:
        panel.stacking(common.StackingConfig().mode(choices.StackingMode.NORMAL).group("A")).min(0).max(1)
    for name, colour in (colours or {}).items():
        fixed = {"mode": FieldColorModeId.FIXED, "fixedColor": colour}
        panel.override_by_name(name, [DynamicConfigValue("color", fixed)])
    if card.limits:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(choices.GraphThresholdsStyleMode.DASHED))
    return panel


def number(card: Card, query: Query, nan: tuple[str, str] | None = None) -> stat.Panel:
    """One number, now; `nan` is text and colour of one that is none."""
    panel = dressed(stat.Panel(), card).with_target(asked(0, query).range())
    panel.graph_mode(choices.BigValueGraphMode.AREA).reduce_options(_last())
    panel.color_mode(choices.BigValueColorMode.VALUE).text_mode(choices.BigValueTextMode.VALUE)
    if nan is not None:
        shown = ValueMappingResult(text=nan[0], color=nan[1])
        panel.mappings([SpecialValueMap(DashboardSpecialValueMapOptions(SpecialValueMatch.NA_N, shown))])
    return panel


def bars(card: Card, query: Query) -> bargauge.Panel:
    """One bar a series, now."""
    panel = dressed(bargauge.Panel(), card).with_target(asked(0, query).instant())
    panel.orientation(choices.VizOrientation.HORIZONTAL).display_mode(choices.BarGaugeDisplayMode.BASIC)
    return panel.reduce_options(_last()).min(0).value_mode(choices.BarGaugeValueMode.TEXT)


def states(card: Card, query: Query, names: Mapping[str, tuple[str, str]]) -> statetimeline.Panel:
    """One row a series, coloured by what it is at the time; `names`: value -> (text, colour)."""
    panel = dressed(statetimeline.Panel(), card).with_target(asked(0, query).range())
    panel.mappings(_mappings(names)).row_height(0.8).merge_values(merge_values=True).fill_opacity(80).line_width(0)
    panel.show_value(choices.VisibilityMode.NEVER).legend(_legend([])).tooltip(_tooltip())
    return panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))


def heat(card: Card, query: Query, *, scheme: str = "Oranges", is_histogram: bool = False) -> heatmap.Panel:
    """One row a series (or a bucket of a histogram), time to the right, the value as colour."""
    target = asked(0, query).range()
    panel = dressed(heatmap.Panel(), card)
    panel.with_target(target.format(PromQueryFormat.HEATMAP) if is_histogram else target)
    panel.calculate(calculate=False).cell_gap(1).show_legend()
    if not is_histogram:
        # Names that are numbers would be taken for upper bounds.
        panel.rows_frame(heatmap.RowsHeatmapOptions().layout(choices.HeatmapCellLayout.UNKNOWN))
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme(scheme)
        .scale(HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
        .reverse(reverse=False)
        .fill("dark-orange")
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
