"""The rules of Grafana's dashboard-linter (github.com/grafana/dashboard-linter), which is a Go program that cannot be had here.

Each rule is a function from a dashboard to sentences about what breaks it, and has the linter's own name. `EXCLUDED` says which rules are
not held, or held in another form, and why.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

Dashboard = dict[str, Any]
Rule = Callable[[Dashboard], Iterator[str]]

EXCLUDED = {
    "template-job-rule": "a run is not a scrape job: `run_id` is on every series of holter's, whoever scrapes it; see template-run-rule",
    "template-instance-rule": "an instance is a process of holter's; what is looked for is the rank; see template-run-rule",
    "target-job-rule": "as template-job-rule; see target-run-rule",
    "target-instance-rule": "as template-instance-rule; see target-run-rule",
    "template-required-variables-rule": "what it requires is up to a configuration: here run and rank, as template-run-rule holds",
    "target-required-matchers-rule": "likewise, as target-run-rule holds",
    "element-reference-rule": "about layouts of the newer schema; a classic dashboard has none",
    "target-logql-rule": "no panel asks Loki",
    "target-logql-auto-rule": "no panel asks Loki",
}
TOTALS = {
    (
        "holter-incidents",
        3,
    ): "all incidents since the run began, and the series begins with the first: an increase would miss it",
    ("holter-incidents", 4): "all halts since the run began",
    ("holter-incidents", 9): "as panel 3",
    ("holter-numerics", 4): "ranks are chosen by all that they have had; what is drawn is the increase",
}
"""Panels that target-counter-agg-rule would refuse: a count since the start of a run is what they are about."""
UNITS = {"none", "short", "percentunit", "sci", "s", "ops", "cps", "percent", "celsius", "watt", "mbytes"}
"""Those of Grafana's units (getValueFormats) that are used."""
SHOWS_UNITS = {"stat", "table", "timeseries", "bargauge", "heatmap"}
RANKED = re.compile(
    r"holter_(rank_info|step|step_seconds_\w+|last_progress_timestamp_seconds|phase|loss|gradient_norm|nonfinite_total|"
    r"collective_lag_seconds|overhead_ratio|observations_dropped_total|sidecar_up|device_\w+)$"
)
"""Metrics with the label `rank`."""
SELECTOR = re.compile(r"(holter_\w+)(?:\{([^}]*)\})?")


def panels(dashboard: Dashboard) -> Iterator[tuple[str, dict[str, Any]]]:
    """With the words that name each."""
    return ((f"{dashboard['uid']} panel {panel['id']} ({panel['title']})", panel) for panel in dashboard["panels"])


def queries(dashboard: Dashboard) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, panel, expression) of every target."""
    for name, panel in panels(dashboard):
        for target in panel["targets"]:
            yield name, panel, target["expr"]


def variables(dashboard: Dashboard) -> dict[str, dict[str, Any]]:
    """By name."""
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}


def template_datasource(dashboard: Dashboard) -> Iterator[str]:
    """A variable `datasource`, labelled `Data source`, of Prometheus."""
    found = variables(dashboard).get("datasource", {})
    wanted = ("datasource", "Data source", "prometheus")
    if wanted != (found.get("type"), found.get("label"), found.get("query")):
        yield f"{dashboard['uid']}: the data source is no variable, or one by another name"


def template_run(dashboard: Dashboard) -> Iterator[str]:
    """In place of template-job-rule and template-instance-rule: `run` is a variable, and `rank` where panels have ranks."""
    has_ranks = any("$rank" in expr for _, _, expr in queries(dashboard))
    for name in ["run", *(["rank"] if has_ranks else [])]:
        found = variables(dashboard).get(name)
        if found is None or found["type"] != "query" or found["datasource"]["uid"] != "${datasource}":
            yield f"{dashboard['uid']}: {name} is no variable, or not of the chosen data source"
        elif name == "rank" and not (found["multi"] and found["includeAll"] and found["allValue"] == ".*"):
            yield f"{dashboard['uid']}: not all ranks can be chosen"


def template_label_promql(dashboard: Dashboard) -> Iterator[str]:
    """Variables are asked for by `label_values`; that the metric in it parses is tested with the panels' queries."""
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query" and not re.fullmatch(r"label_values\(.+, \w+\)", variable["query"]["query"]):
            yield f"{dashboard['uid']}: variable {variable['name']} asks {variable['query']['query']!r}"


def template_on_time_change_reload(dashboard: Dashboard) -> Iterator[str]:
    """Variables follow the time range."""
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query" and variable.get("refresh") != 2:
            yield f"{dashboard['uid']}: variable {variable['name']} keeps its values when the time range changes"


def uneditable_dashboard(dashboard: Dashboard) -> Iterator[str]:
    """What is generated is not edited in place."""
    if dashboard.get("editable") is not False:
        yield f"{dashboard['uid']}: can be edited"


def panel_datasource(dashboard: Dashboard) -> Iterator[str]:
    """Panels and their targets use the chosen data source; marks too."""
    places = [(name, part) for name, panel in panels(dashboard) for part in (panel, *panel["targets"])]
    places += [(f"{dashboard['uid']} mark {mark['name']}", mark) for mark in dashboard["annotations"]["list"]]
    for name, part in places:
        if part.get("datasource") != {"type": "prometheus", "uid": "${datasource}"}:
            yield f"{name}: uses {part.get('datasource')}"


def panel_title_description(dashboard: Dashboard) -> Iterator[str]:
    """Both are there, and say something."""
    for name, panel in panels(dashboard):
        if not panel.get("title") or not panel.get("description", "").endswith((".", "?")):
            yield f"{name}: has no title, or no sentence that describes it"


def panel_units(dashboard: Dashboard) -> Iterator[str]:
    """A unit that Grafana knows, on every panel that shows numbers."""
    for name, panel in panels(dashboard):
        fields = panel["fieldConfig"]
        shown = [fields["defaults"].get("unit")] if panel["type"] in SHOWS_UNITS else []
        shown += [p["value"] for o in fields["overrides"] for p in o["properties"] if p["id"] == "unit"]
        yield from (f"{name}: unit {unit!r}" for unit in shown if unit not in UNITS)


def panel_no_targets(dashboard: Dashboard) -> Iterator[str]:
    """Every panel asks something."""
    yield from (f"{name}: asks nothing" for name, panel in panels(dashboard) if not panel.get("targets"))


def target_rate_interval(dashboard: Dashboard) -> Iterator[str]:
    """Every range is $__rate_interval: what `rate` needs depends on the scrape interval, which Grafana knows."""
    for name, _, expr in queries(dashboard):
        yield from (f"{name}: [{found}]" for found in re.findall(r"\[(.*?)\]", expr) if found != "$__rate_interval")


def target_counter_agg(dashboard: Dashboard) -> Iterator[str]:
    """A counter (_total, _sum, _count, _bucket) is looked at through rate or increase."""
    for name, panel, expr in queries(dashboard):
        for found in re.finditer(r"holter_\w+?_(?:total|sum|count|bucket)\b", expr):
            is_bare = not expr[: found.start()].endswith(("rate(", "increase("))
            if is_bare and (dashboard["uid"], panel["id"]) not in TOTALS:
                yield f"{name}: {found[0]} is not a rate"


def target_run(dashboard: Dashboard) -> Iterator[str]:
    """In place of target-job-rule and target-instance-rule: every selector names run, and rank if the metric has one."""
    run = 'run_id=~"$run"' if variables(dashboard)["run"]["multi"] else 'run_id="$run"'
    has_ranks = "rank" in variables(dashboard)
    for name, _, expr in queries(dashboard):
        for metric, matchers in SELECTOR.findall(expr):
            if run not in matchers:
                yield f"{name}: {metric} looks at other runs too"
            if has_ranks and RANKED.match(metric) and 'rank=~"$rank"' not in matchers:
                yield f"{name}: {metric} looks at ranks that were not chosen"
        for metric in re.findall(r"\bDCGM_\w+", expr):
            if f"holter_rank_info{{{run}, " not in expr:
                yield f"{name}: {metric} is of devices of any run"


RULES: dict[str, Rule] = {
    "template-datasource-rule": template_datasource,
    "template-run-rule": template_run,
    "template-label-promql-rule": template_label_promql,
    "template-on-time-change-reload-rule": template_on_time_change_reload,
    "uneditable-dashboard-rule": uneditable_dashboard,
    "panel-datasource-rule": panel_datasource,
    "panel-title-description-rule": panel_title_description,
    "panel-units-rule": panel_units,
    "panel-no-targets-rule": panel_no_targets,
    "target-rate-interval-rule": target_rate_interval,
    "target-counter-agg-rule": target_counter_agg,
    "target-run-rule": target_run,
}
"""target-promql-rule is held by promtool, on all expressions at once."""
