"""All runs on one screen, each a row with the way to its own dashboard."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards.board import Frame, board
from holter.exporters.dashboards.card import CRITICAL, FINE, Card, Link, Panel, Query
from holter.exporters.dashboards.panels import lines, number
from holter.exporters.dashboards.promql import RUNS, ago, each, or_none, rate, series
from holter.exporters.dashboards.tables import Column, rows

TO_RUN = Link("This run", "/d/holter-overview?var-datasource=${datasource}&var-run=${__value.raw}&${__url_time_range}")
_SIDECARS = f"min by (run_id, rank) ({series('sidecar_up', of=RUNS)})"
_INCIDENTS = f"sum by (run_id) ({each('run_id, cause, severity', series('incident_open', of=RUNS))})"
_KNOWN = each("run_id", series("build_info", of=RUNS))


def build() -> Dashboard:
    """Fleet of runs."""
    text = "All runs that Prometheus knows: which go on, which are in trouble, what each costs."
    frame = Frame("holter-fleet", "holter / Fleet of runs", text, has_ranks=False, has_many_runs=True)
    return board(frame, [*_now(), _table(), *_lately()])


def _now() -> list[Panel]:
    critical = each("run_id", series("incident_open", 'severity="critical"', of=RUNS))
    return [
        number(Card(1, "Runs", "Runs that are watched now.", "none", 6, 5), Query(f"count({_KNOWN})")),
        number(Card(2, "Ranks", "Ranks whose sidecars are connected.", "none", 6, 5), Query(f"sum({_SIDECARS})")),
        number(
            Card(3, "Runs in trouble", "Runs with an open critical incident.", "none", 6, 5, ((1, CRITICAL),), FINE),
            Query(or_none(f"count({critical} > 0)", of=RUNS)),
        ),
        number(
            Card(4, "Ranks unwatched", "Ranks whose sidecar was lost.", "none", 6, 5, ((1, CRITICAL),), FINE),
            Query(f"count({_SIDECARS}) - sum({_SIDECARS})"),
        ),
    ]


def _table() -> Panel:
    queries = (
        Query(f"min by (run_id) ({_each_rank('step')})"),
        Query(f"avg by (run_id) ({_each_rank('loss')})"),
        Query(f"sum by (run_id) ({_SIDECARS})"),
        Query(f"{_INCIDENTS} or 0 * {_KNOWN}"),
        Query(ago(f"max by (run_id) ({_each_rank('last_progress_timestamp_seconds')})")),
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
    speed = f"min by (run_id) ({each('run_id, rank', rate('step_seconds_count', of=RUNS))})"
    return [
        lines(Card(6, "Steps per second", "Of the slowest rank of each run.", "ops", 12), Query(speed, "{{run_id}}")),
        lines(
            Card(7, "Loss", "Mean over the ranks of each run.", "short", 12),
            Query(f"avg by (run_id) ({_each_rank('loss')})", "{{run_id}}"),
        ),
        lines(
            Card(8, "Open incidents", "Of every severity.", "none", 12),
            Query(f"{_INCIDENTS} or 0 * {_KNOWN}", "{{run_id}}"),
        ),
        lines(
            Card(9, "Overhead", "On the rank of each run where holter takes most.", "percentunit", 12),
            Query(f"max by (run_id) ({_each_rank('overhead_ratio')})", "{{run_id}}"),
        ),
    ]


def _each_rank(metric: str) -> str:
    return each("run_id, rank", series(metric, of=RUNS))
