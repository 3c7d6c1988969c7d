"""Where in Grafana an alert is best looked at. Known without Grafana's SDK: alert rules name these, and a test that they are there.

annotations:
__dashboardUid__: holter-incidents     Grafana shows the alert at this panel, and leads from the alert to it
__panelId__: "6"
dashboard: /d/holter-incidents?viewPanel=6&var-run={{ $labels.run_id }}      below Grafana's address, for whoever is paged
"""

from typing import NamedTuple


class PanelPlace(NamedTuple):
    """A panel of a dashboard."""

    uid: str
    panel: int


INCIDENT = PanelPlace("holter-incidents", 6)
FINDING = PanelPlace("holter-incidents", 8)
WATCHER = PanelPlace("holter-self", 4)
OF_ALERT = {
    "coordinator_absent": PanelPlace("holter-self", 11),
    "sidecar_absent": PanelPlace("holter-self", 7),
    "detector_failing": PanelPlace("holter-self", 10),
    "observations_dropped": PanelPlace("holter-self", 6),
    "no_progress": PanelPlace("holter-ranks", 7),
    "halt_failed": PanelPlace("holter-incidents", 10),
    "incidents_not_listed": PanelPlace("holter-incidents", 3),
}
"""Alerts about holter itself that have a panel of their own."""


def place_of(layer: str, name: str) -> PanelPlace:
    """`layer` is incident, finding or watcher; `name` that of the cause, the detector or the alert."""
    return {"incident": INCIDENT, "finding": FINDING}.get(layer) or OF_ALERT.get(name, WATCHER)


def annotations(place: PanelPlace, run: str = "{{ $labels.run_id }}") -> dict[str, str]:
    """What an alert carries so that it leads to the panel; in a rule of Prometheus the run is a template."""
    return {
        "__dashboardUid__": place.uid,
        "__panelId__": str(place.panel),
        "dashboard": f"/d/{place.uid}?viewPanel={place.panel}&var-run={run}",
    }
