"""Panels that more than one dashboard shows."""

from grafana_foundation_sdk.builders import statetimeline, table

from holter.exporters.dashboards.board import INCIDENT_LABELS, TO_INCIDENTS, TO_PAGE
from holter.exporters.dashboards.card import LEVELS, SEVERITIES, Card, Query
from holter.exporters.dashboards.panels import states
from holter.exporters.dashboards.promql import each, series, severe
from holter.exporters.dashboards.tables import Column, rows


def findings(number: int, width: int) -> statetimeline.Panel:
    """What detectors see, as it comes and goes."""
    text = (
        "Detectors whose finding stands, as it comes and goes. One that is confirmed becomes an incident. Empty: none."
    )
    query = Query(severe("detector", "finding_active"), "{{detector}}")
    card = Card(number, "Findings", text, "none", width, link=TO_INCIDENTS)
    return states(card, query, LEVELS)


def open_incidents(number: int, height: int = 6) -> table.Panel:
    """One row an open incident, with the way to its page."""
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
