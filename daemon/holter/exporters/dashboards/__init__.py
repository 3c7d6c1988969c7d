"""Grafana's dashboards as code. Importing this needs the package `grafana-foundation-sdk` (`pip install holter[dashboards]`).

    promql ─▶ panels ─▶ board ─▶ overview, ranks, numerics, incidents, itself, fleet ─▶ JSON

The identifiers of dashboards and panels are public: alerts and other people's links use them. A panel keeps its number for ever, and the
number of a panel that was removed is not used again.
"""

import json
from collections.abc import Callable
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from holter.exporters.dashboards import fleet, incidents, itself, numerics, overview, ranks

ALL: dict[str, Callable[[], Dashboard]] = {
    "holter-overview": overview.build,
    "holter-ranks": ranks.build,
    "holter-numerics": numerics.build,
    "holter-incidents": incidents.build,
    "holter-self": itself.build,
    "holter-fleet": fleet.build,
}
"""Builders of the dashboards by uid, which is also the name of the file."""

_UNKNOWN = {"auto", "auto_count", "auto_min", "footer"}
"""Keys that the SDK always writes, but that Grafana's schema does not allow there."""
_IN_A_MENU = ("placement", "inControlsMenu")
"""Another key that the SDK always writes; it would hide the links and the switches of the annotations."""

__all__ = ["ALL", "render"]


def render(uid: str) -> str:
    """Return a dashboard as JSON that Grafana imports; the bytes are the same every time."""
    content = json.loads(json.dumps(ALL[uid](), cls=JSONEncoder))
    return json.dumps(_pruned(content), indent=2, sort_keys=True) + "\n"


def _pruned(content: Any) -> Any:
    if isinstance(content, dict):
        kept = (item for item in content.items() if item[0] not in _UNKNOWN and item != _IN_A_MENU)
        return {key: _pruned(value) for key, value in kept}
    return [_pruned(value) for value in content] if isinstance(content, list) else content
