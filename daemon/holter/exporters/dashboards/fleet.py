"""Dashboard of all runs: a row for each, with a link to its own dashboard."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards.board import DashboardFrame, board
from holter.exporters.dashboards.panels import (
    CRITICAL,
    FINE,
    Card,
    Column,
    Panel,
    PanelLink,
    Query,
    lines,
    number,
    rows,
)
from holter.exporters.dashboards.promql import RUNS, ago, each, job, job_speed, or_none, series

TO_RUN = PanelLink(
    "This run", "/d/holter-overview?var-datasource=${datasource}&var-run=${__value.raw}&${__url_time_range}"
)
_CONNECTED = each("run_id", series("job_sidecars", 'state="connected"', of=RUNS))
_UNHEARD = each("run_id, state", series("job_sidecars", 'state=~"gone|silent"', of=RUNS))
_INCIDENTS = f"sum by (run_id) ({each('run_id, cause, severity', series('incident_open', of=RUNS))})"
_KNOWN = each("run_id", series("build_info", of=RUNS))


def build() -> Dashboard:
    """Build the dashboard "Fleet of runs"."""
    text = "All runs that Prometheus knows: which go on, which are in trouble, what each costs."
    frame = DashboardFrame("holter-fleet", "holter / Fleet of runs", text, has_ranks=False, has_many_runs=True)
    return board(frame, [*_now(), _table(), *_lately()])


def _now() -> list[Panel]:
    critical = each("run_id", series("incident_open", 'severity="critical"', of=RUNS))
    return [
        number(Card(1, "Runs", "Runs that are watched now.", "none", 6, 5), Query(f"count({_KNOWN})")),
        number(Card(2, "Ranks", "Ranks whose sidecars are connected.", "none", 6, 5), Query(f"sum({_CONNECTED})")),
        number(
            Card(3, "Runs in trouble", "Runs with an open critical incident.", "none", 6, 5, ((1, CRITICAL),), FINE),
            Query(or_none(f"count({critical} > 0)", of=RUNS)),
        ),
        number(
            Card(4, "Ranks unwatched", "Ranks whose sidecar was lost.", "none", 6, 5, ((1, CRITICAL),), FINE),
            Query(f"sum({_UNHEARD})"),
        ),
    ]


def _table() -> Panel:
    queries = (
        Query(_of_job("step")),
        Query(job("loss", "mean", of=RUNS)),
        Query(_CONNECTED),
        Query(f"{_INCIDENTS} or 0 * {_KNOWN}"),
        Query(ago(_of_job("last_progress_timestamp_seconds"))),
    )
    columns = {
        "run_id": Column("Run", link=TO_RUN),
        "Value #A": Column("Steps", "none"),
        "Value #B": Column("Loss", "short"),
        "Value #C": Column("Ranks", "none"),
        "Value #D": Column("Open incidents", "none"),
        "Value #E": Column("Since the last progress", "s"),
    }
    return rows(Card(5, "Runs", "One row a run; its name leads to its overview.", "none", 24), queries, columns)


def _lately() -> list[Panel]:
    speed = Card(6, "Steps per second", "Of each run: steps that every living rank has completed.", "ops", 12)
    return [
        lines(speed, Query(job_speed(of=RUNS), "{{run_id}}")),
        lines(
            Card(7, "Loss", "Mean over the ranks of each run, of those that are finite.", "short", 12),
            Query(job("loss", "mean", of=RUNS), "{{run_id}}"),
        ),
        lines(
            Card(8, "Open incidents", "Of every severity.", "none", 12),
            Query(f"{_INCIDENTS} or 0 * {_KNOWN}", "{{run_id}}"),
        ),
        lines(
            Card(9, "Overhead", "On the rank of each run where holter takes most.", "percentunit", 12),
            Query(_of_job("overhead_ratio"), "{{run_id}}"),
        ),
    ]


def _of_job(metric: str) -> str:
    return each("run_id", series(f"job_{metric}", of=RUNS))
