"""Dashboard of holter itself: its cost, its losses, whether its detectors work, and what it cannot see."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards.board import DashboardFrame, board
from holter.exporters.dashboards.panels import (
    CRITICAL,
    FINE,
    WARNING,
    Card,
    Column,
    Panel,
    Query,
    bars,
    lines,
    number,
    rows,
)
from holter.exporters.dashboards.promql import END, RUN, each, highest, highest_by_rank, increase, rate, series
from holter.exporters.dashboards.ranks import sidecar_states

BUDGET = 0.01
"""Default of HOLTER_OVERHEAD_BUDGET, drawn as the limit."""


def build() -> Dashboard:
    """Build the dashboard "holter itself"."""
    text = (
        "What holter costs, what it loses, whether its detectors work. A watcher that is blind must not look healthy."
    )
    return board(
        DashboardFrame("holter-self", "holter / holter itself", text), [*_now(), *_cost(), *_detectors(), _version()]
    )


def _now() -> list[Panel]:
    failures = each("detector", increase("detector_failures_total", of=RUN))
    return [
        number(
            Card(1, "Overhead", "Share of step time that holter takes, on the rank where it takes most. The default budget is 1 %.", "percentunit", 6, 5, ((BUDGET, WARNING),), FINE),
            Query(each("run_id", series("job_overhead_ratio"))),
        ),
        number(
            Card(2, "Observations lost", "In a second, over all ranks. More than 0: the ring is full, or the line too slow.", "cps", 6, 5, ((0.001, CRITICAL),), FINE),
            Query(each("run_id", rate("job_observations_dropped_total", of=RUN))),
        ),
        number(
            Card(3, "Detectors failing", "Detectors that raised instead of judging. Their silence says nothing.", "none", 6, 5, ((1, CRITICAL),), FINE),
            Query(f"count({failures} > 0) or 0 * sum({failures})"),
        ),
        number(
            Card(4, "Blind spots", "Things that holter cannot see, each a sentence in /api/v1/status.", "none", 6, 5, ((1, WARNING),), FINE),
            Query(each("run_id", series("blind_spots"))),
        ),
    ]  # fmt: skip


def _cost() -> list[Panel]:
    lost, at_the_end = (each("rank", rate("observations_dropped_total", at=at)) for at in ("", END))
    return [
        lines(
            Card(5, "Overhead by rank", "Share of step time; the dashed line is the default budget.", "percentunit", 12, limits=((BUDGET, WARNING),)),
            Query(highest_by_rank("overhead_ratio"), "rank {{rank}}"),
        ),
        lines(
            Card(6, "Observations lost by rank", "In a second.", "cps", 12),
            Query(highest(lost, at_the_end), "rank {{rank}}"),
        ),
        sidecar_states(7),
        lines(
            Card(8, "Time of one judgement", "All detectors together, as long as each took when it last judged.", "s", 12),
            Query(f"sum({each('detector', series('detector_seconds'))})", "all detectors"),
        ),
    ]  # fmt: skip


def _detectors() -> list[Panel]:
    return [
        bars(
            Card(9, "Slowest detectors", "How long each took when it last judged.", "s", 12, 9),
            Query(f"topk(10, {each('detector', series('detector_seconds'))})", "{{detector}}"),
        ),
        bars(
            Card(10, "Failures by detector", "In the last while, the ten that failed most.", "none", 12, 9, ((1, CRITICAL),), FINE),
            Query(f"topk(10, {each('detector', increase('detector_failures_total', of=RUN))})", "{{detector}}"),
        ),
    ]  # fmt: skip


def _version() -> Panel:
    query = Query(f"count by (run_id, version) ({series('build_info')})")
    columns = {"run_id": Column("Run"), "version": Column("Version"), "Value": Column("Processes scraped", "none")}
    text = "Version of holter, and how many of its processes Prometheus reaches: the coordinator, and sidecars if they are scraped too."
    return rows(Card(11, "Version", text, "none", 24, 5), (query,), columns)
