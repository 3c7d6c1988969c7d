"""What a browser, a scraper or a script can read. Everything a rank said is escaped or encoded, never trusted."""

import html
from typing import Any

import msgspec
from aiohttp import hdrs, web

from holter import clock
from holter.coordinator.status import snapshot, status
from holter.coordinator.ward import Ward
from holter.exporters import expose, families

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}


class Pages:
    """The readable half of the one port."""

    def __init__(self, ward: Ward, version: str) -> None:
        self._ward = ward
        self._version = version

    def routes(self) -> list[web.RouteDef]:
        """Every path but /ingest."""
        return [
            web.get("/", self._index),
            web.get("/healthz", self._healthz),
            web.get("/metrics", self._metrics),
            web.get("/api/v1/status", self._status),
            web.get("/api/v1/incidents", self._incidents),
            web.get("/api/v1/incidents/{id}", self._incident),
        ]

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n", headers=_HEADERS)

    async def _metrics(self, request: web.Request) -> web.Response:
        metrics = families(
            self._ward.settings.run_id, self._version, self._ward.roster.snapshots(), snapshot(self._ward)
        )
        body, content_type = expose(metrics, request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def _status(self, _: web.Request) -> web.Response:
        return _json(status(self._ward, clock.wall_ns()))

    async def _incidents(self, _: web.Request) -> web.Response:
        return _json(self._ward.incidents.all())

    async def _incident(self, request: web.Request) -> web.Response:
        found = self._ward.incidents.get(request.match_info["id"])
        return _json({"error": "no such incident"}, status=404) if found is None else _json(found)

    async def _index(self, _: web.Request) -> web.Response:
        page = _render(status(self._ward, clock.wall_ns()))
        return web.Response(text=page, content_type="text/html", headers=_HEADERS)


def _json(content: Any, status: int = 200) -> web.Response:
    # msgspec writes NaN and Inf as null: JSON has no word for them.
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json", headers=_HEADERS
    )


def _render(state: dict[str, Any]) -> str:
    """The plainest page that tells how the run is."""
    columns = ("rank", "host", "step", "phase", "last_progress_age_s", "loss", "sidecar")
    ranks = _table(columns, state["ranks"])
    incidents = _table(("id", "severity", "cause", "symptom"), state["incidents"])
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in [*state["blind"], *state["warnings"]])
    run_id = html.escape(state["run_id"])
    return (
        f"<!doctype html><meta charset=utf-8><title>holter {run_id}</title>"
        "<style>body{font:14px sans-serif}td,th{padding:2px 12px;text-align:left}</style>"
        f"<h1>{run_id}</h1><h2>Incidents</h2>{incidents}<h2>Ranks</h2>{ranks}<ul>{notes}</ul>"
    )


def _table(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(row[column]))}</td>" for column in columns) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
