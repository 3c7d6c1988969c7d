"""Dashboard of incidents, open and past, findings, halts, and the checkpoint to go back to."""

from grafana_foundation_sdk.builders import statetimeline, table
from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards.board import INCIDENT_LABELS, TO_INCIDENTS, TO_PAGE, DashboardFrame, board
from holter.exporters.dashboards.panels import (
    CRITICAL,
    FINE,
    LEVELS,
    SEVERITIES,
    WARNING,
    Card,
    Column,
    Panel,
    Query,
    bars,
    lines,
    number,
    rows,
    states,
)
from holter.exporters.dashboards.promql import RUN, each, increase, or_none, series, severe


def build() -> Dashboard:
    """Build the dashboard "Incidents and halts"."""
    text = "What went wrong and what was done: incidents open and past, findings, halts, the checkpoint to go back to."
    frame = DashboardFrame("holter-incidents", "holter / Incidents and halts", text, has_ranks=False)
    return board(frame, [open_incidents(6), *_now(), *_past()])


def _now() -> list[Panel]:
    severe = {"critical": CRITICAL, "warning": WARNING}
    standing = {name: each("cause", series("incident_open", f'severity="{name}"')) for name in severe}
    halted = each("outcome", series("halts_total", 'outcome="completed"'))
    counted = [
        number(
            Card(index, f"Open, {severity}", f"Incidents of severity {severity} that stand now.", "none", 5, 5, ((1, colour),), FINE),
            Query(or_none(f"sum({standing[severity]})")),
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
            Query(f"sum({halted})"),
        ),
        number(
            Card(5, "Last good checkpoint", "Completed steps in the newest checkpoint whose numbers are good: where to go back to.", "none", 4, 5),
            Query(each("run_id", series("checkpoint_last_good_step"))),
        ),
    ]  # fmt: skip


def _past() -> list[Panel]:
    return [
        states(
            Card(7, "Incidents over time", "Causes of incidents, while they are open. Empty: none.", "none", 12),
            Query(severe("cause", "incident_open"), "{{cause}}"),
            LEVELS,
        ),
        findings(8, width=12),
        bars(
            Card(9, "Incidents by cause", "Since the run began, closed ones too.", "none", 12),
            Query(f"{each('cause', series('incidents_total'))} > 0", "{{cause}}"),
        ),
        lines(
            Card(10, "Halts", "By how they ended: completed left a whole checkpoint, called_off found the run well again, refused could not be begun, incomplete and failed need a person.", "none", 12),
            Query(each("outcome", increase("halts_total", of=RUN)), "{{outcome}}"),
        ),
    ]  # fmt: skip


def findings(number: int, width: int) -> statetimeline.Panel:
    """Build the panel of detectors' findings over time, which the overview shows, too."""
    text = (
        "Detectors whose finding stands, as it comes and goes. One that is confirmed becomes an incident. Empty: none."
    )
    query = Query(severe("detector", "finding_active"), "{{detector}}")
    card = Card(number, "Findings", text, "none", width, link=TO_INCIDENTS)
    return states(card, query, LEVELS)


def open_incidents(number: int, height: int = 6) -> table.Panel:
    """Build the table of open incidents, with a link to each one's page; the overview shows it, too."""
    text = (
        "What stands now: cause, who, where, since which step. The link opens the incident's page at the coordinator."
    )
    query = Query(each(INCIDENT_LABELS, series("incident_info")))
    columns = {
        "severity": Column("Severity", colours=SEVERITIES),
        "cause": Column("Cause"),
        "ranks": Column("Ranks"),
        "tensors": Column("Tensors"),
        "collective": Column("Collective"),
        "step": Column("Since step"),
        "incident": Column("Incident"),
        "url": Column("Page", link=TO_PAGE),
    }
    return rows(Card(number, "Open incidents", text, "none", 24, height), (query,), columns)
