"""The frame of a dashboard: variables, annotations for incidents and halts, links to the other dashboards, and its panels."""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard, prometheus
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    VariableModel,
    VariableRefresh,
    VariableSort,
)

from holter.exporters.dashboards.panels import CRITICAL, SOURCE, Panel, PanelLink
from holter.exporters.dashboards.promql import RUN, RUNS, each, increase, series

TAG = "holter"
INCIDENT_LABELS = "incident, cause, severity, ranks, tensors, collective, step, url"
_HERE = "var-datasource=${datasource}&var-run=${run}&${__url_time_range}"
TO_INCIDENTS = PanelLink("Incidents of this run", f"/d/holter-incidents?{_HERE}")
TO_RANKS = PanelLink("Ranks of this run", f"/d/holter-ranks?{_HERE}")
TO_SELF = PanelLink("holter itself", f"/d/holter-self?{_HERE}")
TO_PAGE = PanelLink("The incident's page", "${__value.raw}")
"""Link for the label `url` of holter_incident_info: the coordinator's page, opened at the incident."""


@dataclass(frozen=True)
class DashboardFrame:
    """Name and description of a dashboard, and which variables it offers."""

    uid: str
    title: str
    text: str
    has_ranks: bool = True
    has_many_runs: bool = False


def board(frame: DashboardFrame, panels: Sequence[Panel]) -> Dashboard:
    """Build a dashboard; its panels flow from left to right, then downwards."""
    made = dashboard.Dashboard(frame.title).uid(frame.uid).description(frame.text).tags([TAG]).readonly()
    made.time("now-1h", "now").refresh("30s").timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR)
    made.variables(_variables(frame))
    of = RUNS if frame.has_many_runs else RUN
    made.annotation(_incidents(of)).annotation(_halts(of))
    others = dashboard.DashboardLink("holter").type(DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(True)
    made.link(others.keep_time(True).include_vars(True))
    for panel in panels:
        made.with_panel(panel)
    return made.build()


def _variables(frame: DashboardFrame) -> list[Builder[VariableModel]]:
    found: list[Builder[VariableModel]]
    found = [dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")]
    run = _variable("run", "Run", "label_values(holter_build_info, run_id)", VariableSort.ALPHABETICAL_DESC)
    found.append(run.multi(True).include_all(True).all_value(".*") if frame.has_many_runs else run)
    if frame.has_ranks:
        query = f"label_values({series('sidecar_up')}, rank)"
        found.append(
            _variable("rank", "Rank", query, VariableSort.NUMERICAL_ASC).multi(True).include_all(True).all_value(".*")
        )
    return found


def _variable(name: str, label: str, query: str, sort: VariableSort) -> dashboard.QueryVariable:
    made = dashboard.QueryVariable(name).label(label).query({"query": query, "refId": name})
    return made.datasource(SOURCE).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(sort)


def _incidents(of: str) -> dashboard.AnnotationQuery:
    made = _annotation("Incidents", "orange", each(f"run_id, {INCIDENT_LABELS}", series("incident_info", of=of)))
    made.title_format("{{cause}}, ranks {{ranks}}").tag_keys("severity,run_id")
    return made.text_format('since step {{step}}: <a href="{{url}}">{{incident}}</a>')


def _halts(of: str) -> dashboard.AnnotationQuery:
    made = _annotation("Halts", CRITICAL, f"{each('run_id, outcome', increase('halts_total', of=of))} > 0")
    return made.title_format("halt: {{outcome}}").tag_keys("outcome,run_id").text_format("run {{run_id}}")


def _annotation(name: str, colour: str, expr: str) -> dashboard.AnnotationQuery:
    target = prometheus.Dataquery().ref_id("Anno").expr(expr).datasource(SOURCE).range()
    made = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).hide(False).icon_color(colour)
    return made.target(target)
