"""The wording of alerts about incidents and the panels that they link to, shared by Prometheus' rules and the webhook.

A panel is named without Grafana's SDK; a test holds that it is there. An alert carries it as annotations:

    __dashboardUid__: holter-incidents     Grafana shows the alert at this panel, and links from the alert to it
    __panelId__: "6"
    dashboard: /d/holter-incidents?viewPanel=6&var-run={{ $labels.run_id }}      below Grafana's address, for whoever is paged
"""

from collections.abc import Sequence
from typing import NamedTuple

from holter.exporters.snapshot import IncidentInfo
from holter.records import Collective, Diagnosis
from holter.records.titles import titled

RUNBOOKS = "https://holter.example/runbooks"
"""Default address of `grafana/runbooks`; `holter alerts --runbooks URL` writes another one into the rules."""
MAX_NAMES = 4
"""Number of ranks or tensors that are named; the rest are counted."""
MAX_NAME = 120
"""Largest number of characters shown of a name that comes from the script."""


def alert_name(name: str) -> str:
    """Return the name of an alert on a pager: `nonfinite_input` becomes `HolterNonfiniteInput`."""
    return "Holter" + "".join(word.capitalize() for word in name.split("_"))


def incident_info(diagnosis: Diagnosis, address: str) -> IncidentInfo:
    """Describe the leading cause of an incident in short strings; `address` is the coordinator's."""
    leading = diagnosis.causes[0] if diagnosis.causes else None
    return IncidentInfo(
        incident=diagnosis.id,
        cause=leading.cause if leading else "unknown",
        severity=diagnosis.severity,
        ranks=_first_few([str(rank) for rank in leading.ranks]) if leading else "",
        tensors=_first_few(leading.tensors or leading.modules) if leading else "",
        collective=_call_text(leading.collective) if leading else "",
        step=str(diagnosis.first_step) if diagnosis.first_step >= 0 else "",
        url=f"{address}/#incident={diagnosis.id}",
    )


def describe(info: IncidentInfo, run_id: str) -> str:
    """Return the description of an alert about an incident; Prometheus' rules say the same in their templates."""
    where = (("Rank", info.ranks), ("Tensor", info.tensors), ("Collective", info.collective), ("Since step", info.step))
    said = "".join(f" {word} {value}." for word, value in where if value)
    return (
        f"Run {run_id}: {titled(info.cause)}.{said} Diagnosis: {info.url} (incident {info.incident}); what to do: holter explain "
        f"{info.cause}."
    )


def clipped(name: str) -> str:
    """Cut a long name to its end, where it differs from its siblings."""
    return name if len(name) <= MAX_NAME else "…" + name[1 - MAX_NAME :]


def _first_few(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    named = ", ".join(clipped(name) for name in names[:MAX_NAMES])
    return f"{named} and {more:,} more" if more > 0 else named


def _call_text(collective: Collective | None) -> str:
    if collective is None:
        return ""
    return (
        f"{clipped(collective.operation)} #{collective.sequence} of {clipped(collective.group) or 'the default group'}"
    )


class PanelPlace(NamedTuple):
    """A panel of a dashboard, by the ids that Grafana uses."""

    uid: str
    panel: int


INCIDENT_PANEL = PanelPlace("holter-incidents", 6)
FINDING_PANEL = PanelPlace("holter-incidents", 8)
WATCHER_PANEL = PanelPlace("holter-self", 4)
PANEL_OF_ALERT = {
    "coordinator_absent": PanelPlace("holter-self", 11),
    "sidecar_absent": PanelPlace("holter-self", 7),
    "detector_failing": PanelPlace("holter-self", 10),
    "observations_dropped": PanelPlace("holter-self", 6),
    "no_progress": PanelPlace("holter-ranks", 7),
    "halt_failed": PanelPlace("holter-incidents", 10),
    "incidents_not_listed": PanelPlace("holter-incidents", 3),
}
"""Panels of alerts about holter itself that have one of their own."""


def panel_of(layer: str, name: str) -> PanelPlace:
    """Return the panel that an alert leads to.

    `layer` is incident, finding or watcher; `name` is that of the cause, the detector or the alert.
    """
    return {"incident": INCIDENT_PANEL, "finding": FINDING_PANEL}.get(layer) or PANEL_OF_ALERT.get(name, WATCHER_PANEL)


def panel_annotations(place: PanelPlace, run: str = "{{ $labels.run_id }}") -> dict[str, str]:
    """Return the annotations that lead from an alert to the panel; in Prometheus' rules the run is a template."""
    return {
        "__dashboardUid__": place.uid,
        "__panelId__": str(place.panel),
        "dashboard": f"/d/{place.uid}?viewPanel={place.panel}&var-run={run}",
    }
