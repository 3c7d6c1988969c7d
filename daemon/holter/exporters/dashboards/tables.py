"""Tables: queries of one moment, joined by the labels they share, a column for each label or value that is named."""

from collections.abc import Mapping
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, table
from grafana_foundation_sdk.models.common import TableAutoCellOptions
from grafana_foundation_sdk.models.dashboard import (
    DataTransformerConfig,
    DynamicConfigValue,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from holter.exporters.dashboards.card import Card, PanelLink, Query, asked, dressed


@dataclass(frozen=True)
class Column:
    """One column."""

    title: str
    unit: str = ""
    colours: Mapping[str, str] | None = None
    """Value -> colour of its text."""
    link: PanelLink | None = None


def rows(card: Card, queries: tuple[Query, ...], columns: Mapping[str, Column]) -> table.Panel:
    """Columns by field: a label's name, `Value #A` for the first query's value, `Value` if it is the only one; the first sorts."""
    panel = dressed(table.Panel(), card).show_header(show_header=True).cell_options(TableAutoCellOptions())
    panel.sort_by([common.TableSortByFieldState().display_name(next(iter(columns.values())).title)])
    for number, query in enumerate(queries):
        panel.with_target(asked(number, query).instant().format(PromQueryFormat.TABLE))
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
