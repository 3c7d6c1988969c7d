"""What went wrong and what was done: incidents open and past, findings, halts, the checkpoint to go back to."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards.board import DashboardFrame, board
from holter.exporters.dashboards.card import CRITICAL, FINE, LEVELS, WARNING, Card, Panel, Query
from holter.exporters.dashboards.panels import bars, lines, number, states
from holter.exporters.dashboards.promql import RUN, each, increase, or_none, series, severe
from holter.exporters.dashboards.shared import findings, open_incidents


def build() -> Dashboard:
    """Incidents and halts."""
    text = "What went wrong and what was done: incidents open and past, findings, halts, the checkpoint to go back to."
    frame = DashboardFrame("holter-incidents", "holter / Incidents and halts", text, has_ranks=False)
    return board(frame, [*_now(), open_incidents(6), *_past()])


def _now() -> list[Panel]:
    severe = {"critical": CRITICAL, "warning": WARNING}
    counted = [
        number(
            Card(index, f"Open, {severity}", f"Incidents of severity {severity} that stand now.", "none", 5, 5, ((1, colour),), FINE),
            Query(or_none(f"sum({_open(severity)})")),
        )
        for index, (severity, colour) in enumerate(severe.items(), start=1)
    ]  # fmt: skip
    return [
        *counted,
        number(
            Card(3, "Incidents so far", "Since the run began, closed ones too.", "none", 5, 5),
            Query(or_none(f"sum({each('cause', series('incidents_total'))})")),
        ),
        number(
            Card(4, "Halts", "Halts that left a whole checkpoint, since the run began.", "none", 5, 5),
            Query(f"sum({each('outcome', series('halts_total', _COMPLETED))})"),
        ),
        number(
            Card(5, "Last good checkpoint", "Completed steps in the newest checkpoint whose numbers are good: where to go back to.", "none", 4, 5),
            Query(each("run_id", series("checkpoint_last_good_step"))),
        ),
    ]  # fmt: skip


_COMPLETED = 'outcome="completed"'


def _past() -> list[Panel]:
    return [
        states(
            Card(7, "Incidents over time", "Causes of incidents, while they are open. Empty: none.", "none", 12),
            Query(severe("cause", "incident_open"), "{{cause}}"),
            LEVELS,
        ),
        findings(8, width=12),
        bars(
            Card(9, "Incidents by cause", "Since the run began.", "none", 12, limits=((1, WARNING),)),
            Query(f"{each('cause', series('incidents_total'))} > 0", "{{cause}}"),
        ),
        lines(
            Card(10, "Halts", "By how they ended: completed left a whole checkpoint, called_off found the run well again, refused could not be begun, incomplete and failed need a person.", "none", 12),
            Query(each("outcome", increase("halts_total", of=RUN)), "{{outcome}}"),
        ),
    ]  # fmt: skip


def _open(severity: str) -> str:
    return each("cause", series("incident_open", f'severity="{severity}"'))
