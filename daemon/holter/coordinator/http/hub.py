"""The page, JSON and metrics of many runs on one NATS server; read-only, and not part of any run.

bucket ──FleetReader, every second──▶ / (a table that reloads itself), /api/v1/runs, /metrics, /healthz
"""

import asyncio
import html
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import hdrs, web
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.parser import text_string_to_metric_families

from holter import clock
from holter.coordinator.http.doors import Doors, DoorSettings, runner_of
from holter.exporters.prometheus import accepted_format, expose, hub_families
from holter.exporters.run_card import RunCard
from holter.faults import CAUSES
from holter.files import UNREADABLE
from holter.status_page import assets
from holter.transport.nats.fleet import FleetReader, KnownRun
from holter.transport.nats.lease import RENEW_S
from holter.transport.nats.line import NatsPlace, failures, line_to

READ_S = 1.0
LOOKS = 4
"""Number of looks by a command that ends; some renewals of a lease happen in between."""
PAUSE_S = 1.0
STALE_S = 10.0
"""Seconds after which what was read is called old."""

logger = logging.getLogger(__name__)


def card_of_run(known: KnownRun) -> RunCard | None:
    """Return the card that the run's coordinator wrote; None if there is none that can be read."""
    try:
        return msgspec.json.decode(known.lease.card, type=RunCard | None) if known.lease is not None else None
    except UNREADABLE:
        return None


def told(known: KnownRun, now_s: float) -> dict[str, Any]:
    """Return the facts about one run, as JSON."""
    card = card_of_run(known)
    state = known.state(now_s)
    if card is not None and state == "live":
        state = card.state
    if card is not None and state == "ended":
        state = card.state if card.state == "halted" else "ended"
    shown = msgspec.to_builtins(without_metrics(card)) if card is not None else {}
    holder = known.lease.holder if known.lease is not None else ""
    # Named after its own key, so that no run can speak for another.
    return shown | {
        "run_id": known.run_id,
        "state": state,
        "holder": holder,
        "token": known.lease.token if known.lease is not None else 0,
    }


def without_metrics(card: RunCard) -> RunCard:
    """Return the card without metrics, for people."""
    return msgspec.structs.replace(card, metrics="")


def in_order(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort runs: those with an open critical incident first, then those with other open ones, then the newest."""
    newest = sorted(runs, key=lambda one: str(one.get("started_at", "")), reverse=True)
    return sorted(
        newest, key=lambda one: (one["state"] == "ended", not one.get("is_critical"), not one.get("num_open"))
    )


class Hub:
    """Reads the runs in the background and serves them from memory."""

    def __init__(self, place: NatsPlace, version: str) -> None:
        self.reader = FleetReader()
        self.trouble = "nothing was read yet"
        """Why nothing could be read last time; empty if it could."""
        self._place, self._version = place, version
        self._assets = assets.load()

    async def keep_reading(self) -> None:
        """Read again and again, without end."""
        while True:
            try:
                async with line_to(self._place, "reader") as line:
                    while not line.is_lost.is_set():
                        await self.reader.read(line)
                        self.trouble = ""
                        await asyncio.sleep(READ_S)
            except failures() as error:
                why = f"{type(error).__name__}: {error}"
                if why != self.trouble:
                    logger.warning("the runs cannot be read: %s", why)
                self.trouble = why
            await asyncio.sleep(PAUSE_S)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes, all of which only read."""
        return [
            web.get("/", self._page),
            web.get("/web/{name}", self._asset),
            web.get("/api/v1/runs", self._runs),
            web.get("/metrics", self._metrics),
            web.get("/healthz", self._healthz),
        ]

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs as of now, most severe first."""
        now_s = clock.monotonic_s()
        return in_order(told(known, now_s) for known in self.reader.runs.values())

    async def _page(self, _: web.Request) -> web.Response:
        text = page(self.runs(), self.trouble, self._age_s())
        return web.Response(text=text, content_type="text/html", headers=assets.HEADERS)

    async def _asset(self, request: web.Request) -> web.Response:
        return assets.serve(self._assets, request)

    async def _runs(self, _: web.Request) -> web.Response:
        about = {"schema": 1, "trouble": self.trouble, "read_s_ago": self._age_s(), "runs": self.runs()}
        return web.json_response(about, headers=assets.HEADERS)

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"ok": not self.trouble, "runs": len(self.reader.runs)}, status=503 if self.trouble else 200
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        now_s, made = clock.monotonic_s(), []
        for known in self.reader.runs.values():
            shown = metrics_of(known) if known.state(now_s) == "live" else None
            counted = {
                sample.labels.get("cause", "")
                for family in shown or ()
                for sample in family.samples
                if family.name == "holter_incidents"
            }
            zeros = set(CAUSES) - counted if shown is not None else set()
            made += [hub_families(known.run_id, told(known, now_s)["state"], zeros), shown or []]
        body, kind = expose(merged(made), accepted_format(request.headers.get(hdrs.ACCEPT, "")[:1000]))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: kind})

    def _age_s(self) -> float | None:
        read_s = self.reader.read_s
        return None if read_s is None else round(clock.monotonic_s() - read_s, 1)


async def runs_of(place: NatsPlace) -> list[dict[str, Any]]:
    """Read all runs of a server once. Raises what nats-py does.

    This takes as long as it takes to see whether somebody renews their leases.
    """
    reader = FleetReader()
    async with line_to(place, "reader") as line:
        for _ in range(LOOKS):
            await reader.read(line)
            await asyncio.sleep(RENEW_S)
        await reader.read(line)
    now_s = clock.monotonic_s()
    found = [told(known, now_s) for known in reader.runs.values()]
    return in_order(one | {"state": "silent"} if one["state"] == "unknown" else one for one in found)


def metrics_of(known: KnownRun) -> list[MetricFamily] | None:
    """Return what the coordinator's own /metrics say of the job and its incidents, labelled with this run.

    None if that cannot be read.
    """
    card = card_of_run(known)
    try:
        made = list(text_string_to_metric_families(card.metrics)) if card is not None and card.metrics else None
    except ValueError:
        return None
    for sample in (sample for family in made or () for sample in family.samples):
        sample.labels["run_id"] = known.run_id
    return made


def merged(parts: Iterable[list[MetricFamily]]) -> list[MetricFamily]:
    """Merge metrics of the same name, with the samples of all runs."""
    found: dict[str, MetricFamily] = {}
    for family in (family for part in parts for family in part):
        if family.name in found:
            found[family.name].samples.extend(family.samples)
        else:
            found[family.name] = family
    return list(found.values())


def page(runs: list[Mapping[str, Any]] | list[dict[str, Any]], trouble: str, age_s: float | None) -> str:
    """Return a table of the runs as a page without scripts that reloads itself."""
    rows = "\n".join(_row(one) for one in runs)
    num_critical = sum(bool(one.get("is_critical")) and one["state"] != "ended" for one in runs)
    num_live = sum(one["state"] in {"running", "halting"} for one in runs)
    num_silent = sum(one["state"] in {"silent", "unreadable"} for one in runs)
    verdict = ("is-fine", "no open critical incident")
    if num_silent:
        # What a run last said of itself does not show that it is healthy.
        verdict = ("is-warning", f"{num_silent} of {len(runs)} runs without a coordinator: nobody watches them")
    if num_critical:
        verdict = ("is-critical", f"{num_critical} of {len(runs)} runs with an open critical incident")
    if trouble or (age_s is not None and age_s > STALE_S):
        verdict = ("is-warning", f"the runs cannot be read: {trouble or 'no answer'}; what is shown is old")
    table = (
        '<table><thead><tr><th scope="col">Run</th><th scope="col">State</th><th scope="col">Incidents</th><th scope="col">Ranks</th>'
        '<th scope="col">Steps</th><th scope="col">Started</th><th scope="col">Coordinator</th></tr></thead>'
        f"<tbody>\n{rows}\n</tbody></table>"
        if runs
        else "<p>No run has been here.</p>"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta http-equiv="refresh" content="5">\n<title>holter: all runs</title>\n'
        '<link rel="icon" href="web/icon.svg">\n<link rel="stylesheet" href="web/page.css">\n<link rel="stylesheet" href="web/hub.css">\n</head>\n<body>\n'
        '<div id="app">\n<header class="top"><div><h1><img src="web/icon.svg" alt="" width="28" height="28"> All runs</h1>'
        f"<p>{num_live} running, {len(runs)} known; this page only reads, and reloads itself every 5 s</p></div></header>\n"
        f'<main id="main">\n<section id="verdict" aria-label="Verdict"><div class="{verdict[0]}"><p class="what">{html.escape(verdict[1])}</p></div></section>\n'
        f'<section id="runs" aria-label="Runs">{table}</section>\n</main>\n</div>\n</body>\n</html>\n'
    )


def _row(one: Mapping[str, Any]) -> str:
    name, where = html.escape(str(one["run_id"])), str(one.get("page", ""))
    is_link = where.startswith(("http://", "https://")) and one["state"] in {"running", "halting"}
    run = f'<a href="{html.escape(where, quote=True)}">{name}</a>' if is_link else name
    ranks = f"{one['connected']} of {one['world_size']}" if "world_size" in one else "-"
    state = html.escape(str(one["state"]))
    cells = (
        f'<th scope="row">{run}<small>{html.escape(str(one.get("run_dir", "")))}</small></th>',
        f'<td><span class="state {state}">{state}</span></td>',
        f"<td>{_incidents(one)}</td>",
        f"<td>{ranks}</td>",
        f"<td>{one.get('steps', '-')}</td>",
        f"<td>{html.escape(str(one.get('started_at', ''))[:16].replace('T', ' '))}</td>",
        f"<td>{html.escape(str(one.get('host', '')))}<small>token {one['token']}</small></td>",
    )
    return f"<tr>{''.join(cells)}</tr>"


def _incidents(one: Mapping[str, Any]) -> str:
    told_of = [found for found in one.get("incidents", []) if found["is_open"]]
    if not told_of:
        over = one.get("num_incidents", 0)
        return f"{over} over" if over else "none"
    parts = []
    for found in told_of[-3:]:
        where = f" on {found['ranks']}" if found["ranks"] else ""
        words = html.escape(f"{found['title']}{where} at step {found['step']}")
        parts.append(
            f'<span class="badge {html.escape(found["severity"])}">{html.escape(found["severity"])}</span> {words}'
        )
    more = one.get("num_open", len(told_of)) - len(parts)
    return "<br>".join(parts) + (f"<br>and {more} more" if more > 0 else "")


async def serve_hub(  # noqa: PLR0913, PLR0917 - what a user chooses
    place: NatsPlace, doors: DoorSettings, host: str, port: int, version: str, say: Callable[[str], None]
) -> None:
    """Serve the hub until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    hub, guarded = Hub(place, version), Doors(doors)
    app = web.Application(middlewares=[guarded.middleware])
    app.add_routes(hub.routes())
    runner = runner_of(app)
    await runner.setup()
    assert runner.server is not None
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    await guarded.open(listener, runner.server)
    reading = asyncio.create_task(hub.keep_reading())
    scheme = "https" if doors.tls.is_on else "http"
    say(f"all runs at {scheme}://{host}:{listener.getsockname()[1]}")
    await stop.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await guarded.close()
    await runner.cleanup()
