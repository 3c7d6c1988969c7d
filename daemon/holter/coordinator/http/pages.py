"""The pages for browsers, scrapers and scripts, and one request: `POST /api/v1/halt`, for those who have the token.

    | 202 | the halt will be tried |
    | 401, 403 | wrong token; a page of another host asks |
    | 409 | it is not possible, with the reason |
    | 408, 413, 422 | this is no valid request |

What takes long to make is made once for all who ask (`renderings.py`). The cost of a scrape of `/metrics` does not grow
with the number of modules, and hardly with the number of ranks. Everything that a rank said is escaped or encoded,
never trusted.
"""

import asyncio
import html
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import msgspec
from aiohttp import hdrs, web

from holter import clock
from holter.coordinator.announcer import sidecar_targets
from holter.coordinator.http.page_state import PageState
from holter.coordinator.http.renderings import Renderings
from holter.coordinator.http.status import rank_details, status
from holter.coordinator.judge import DIAGNOSIS
from holter.coordinator.roster import Roster
from holter.coordinator.run import Run
from holter.coordinator.window.assembly import Assembly
from holter.diagnosis import report
from holter.diagnosis.explain import WORST_FIRST
from holter.diagnosis.report import printable
from holter.exporters.alert_text import incident_info
from holter.exporters.prometheus import accepted_format, expose, families
from holter.exporters.snapshot import CoordinatorSnapshot, IncidentInfo, JobFigures, ModuleFigures
from holter.faults.window import Spread, StepNumbers
from holter.files import UNREADABLE
from holter.records import ModuleVitals, Vitals
from holter.status_page import assets
from holter.status_page.assets import HEADERS
from holter.status_page.event_stream import EventStream
from holter.transport.access import bearer, is_same

AskHalt = Callable[[str, str], str | None]
"""Called with (reason, by whom); returns why a halt is not possible, or None if it will be tried."""
MAX_BODY_BYTES = 8 * 2**10
BODY_DEADLINE_S = 5.0
MAX_PLAIN = 128
"""Number of ranks in the table of the page itself; `/plain` has all."""
MAX_ACCEPT = 200
"""Largest length of the header that says which format of metrics is wanted."""
MAX_DIGITS = 9
"""Largest number of digits of a requested rank, because Python refuses to parse thousands."""
RANKS = {
    "rank": "Rank",
    "host": "Host",
    "step": "Step",
    "phase": "Phase",
    "last_progress_age_s": "Seconds since it moved",
    "loss": "Loss",
    "sidecar": "Sidecar",
}
INCIDENTS = {
    "id": "Incident",
    "severity": "Severity",
    "cause": "Cause",
    "symptom": "Symptom",
    "opened_at": "Opened",
    "closed_at": "Closed",
    "report": "Diagnosis",
}
"""Titles of the columns by field."""


SPREADS = ("loss", "gradient_norm", "learning_rate", "seconds", "loss_scale")
LOOK_BACK = 64
"""Number of steps back in which the newest value of a number is looked for: not every step reads a loss."""


class HaltRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request to halt."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]
    by: Annotated[str, msgspec.Meta(max_length=200)] = ""


async def answer_halt(request: web.Request, token: str, ask_halt: AskHalt | None) -> tuple[int, dict[str, Any]]:
    """Return status and content of the answer to a request to halt."""
    if not _is_own_origin(request):
        return 403, {"error": "a page of another host may not ask for this"}
    shown = bearer(request.headers.get(hdrs.AUTHORIZATION, ""))
    if not token or not is_same(shown, token):
        return 401, {"error": "wrong token; `halt_token` in coordinator.json of the run directory is the one"}
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            asked = msgspec.json.decode(await _request_body(request), type=HaltRequest)
    except OverflowError:
        return 413, {"error": f"the request is longer than {MAX_BODY_BYTES} bytes"}
    except TimeoutError:
        return 408, {"error": "the request did not come to its end"}
    except UNREADABLE as error:
        return 422, {"error": f"this is no request to halt: {error}"}
    # The name is what the client claims; its address is not.
    by = f"{asked.by or 'unknown'} from {request.remote}"
    why = "halting is not available here" if ask_halt is None else ask_halt(asked.reason, by)
    return (409, {"error": why}) if why is not None else (202, {"accepted": True, "reason": asked.reason})


class Pages:
    """Serves everything that can be read on the port, and the request to halt."""

    def __init__(
        self,
        run: Run,
        version: str,
        *,
        token: str = "",
        ask_halt: AskHalt | None = None,
        page_state: PageState | None = None,
    ) -> None:
        self.page_state = page_state or PageState(run, clock.wall_ns)
        self.events = EventStream(self.page_state.paint, self.page_state.now_ns)
        self._run = run
        self._version = version
        self._token = token
        self._ask_halt = ask_halt
        self._assets = assets.load()
        self._renderings = Renderings()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of every path but /ingest."""
        return [
            web.get("/", self._index),
            web.get("/plain", self._plain),
            web.get("/web/{name}", self._asset),
            web.get("/healthz", self._healthz),
            web.get("/metrics", self._metrics),
            web.get("/sd", self._sd),
            web.get("/api/v1/status", self._status),
            web.get("/api/v1/events", self.events.handle),
            web.get("/api/v1/ranks/{rank}", self._rank),
            web.get("/api/v1/incidents", self._incidents),
            web.get("/api/v1/incidents/{id}", self._incident),
            web.get("/api/v1/incidents/{id}/report", self._report),
            web.post("/api/v1/halt", self._halt),
        ]

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n", headers=HEADERS)

    async def _metrics(self, request: web.Request) -> web.Response:
        # One of two formats: every other header would be rendered separately.
        accept = accepted_format(request.headers.get(hdrs.ACCEPT, "")[:MAX_ACCEPT])
        body, content_type = self._renderings.get(f"/metrics {accept}", lambda: self._expose(accept))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    def _expose(self, accept: str) -> tuple[bytes, str]:
        run = self._run
        return expose(families(run.settings.run_id, self._version, run.roster.snapshots(), snapshot(run)), accept)

    async def _sd(self, _: web.Request) -> web.Response:
        run = self._run
        return _sent(self._renderings.get("/sd", lambda: _encode(sidecar_targets(run.roster, run.settings.run_id))))

    async def _status(self, _: web.Request) -> web.Response:
        return _sent(self._renderings.get("/status", lambda: _encode(status(self._run, self.page_state.now_ns()))))

    async def _rank(self, request: web.Request) -> web.Response:
        name = request.match_info["rank"]
        is_number = name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS
        member = self._run.roster.members.get(int(name)) if is_number else None
        if member is None:
            return _json({"error": "no such rank"}, status=404)
        return _json(rank_details(member, self.page_state.now_ns()))

    async def _incidents(self, _: web.Request) -> web.Response:
        return _sent(self._renderings.get("/incidents", lambda: _encode(self._run.incidents.all())))

    async def _incident(self, request: web.Request) -> web.Response:
        found = self._run.incidents.get(request.match_info["id"])
        return _json({"error": "no such incident"}, status=404) if found is None else _json(found)

    async def _report(self, request: web.Request) -> web.Response:
        """Return a report for the page to show within itself."""
        found = self._run.incidents.get(request.match_info["id"])
        if found is None:
            return web.Response(status=404, text="no such incident\n", headers=HEADERS)
        text = self._renderings.get(f"report {found.id}", lambda: report.to_fragment(found))
        return web.Response(text=text, content_type="text/html", headers=HEADERS)

    async def _halt(self, request: web.Request) -> web.Response:
        code, content = await answer_halt(request, self._token, None if self._ask_halt is None else self._ask)
        return _json(content, status=code)

    def _ask(self, reason: str, by: str) -> str | None:
        assert self._ask_halt is not None
        why = self._ask_halt(reason, by)
        if why is None:
            # The next status must not be an older one: its outcome of the last halt would be taken for the answer to
            # this request.
            self._renderings.forget("/status")
            self.page_state.timeline.note("halt", f"asked for by {by}: {reason}", self.page_state.now_ns(), "warning")
        return why

    async def _asset(self, request: web.Request) -> web.Response:
        return assets.serve(self._assets, request)

    async def _index(self, _: web.Request) -> web.Response:
        page = self._renderings.get("/", self._render_index)
        return web.Response(text=page, content_type="text/html", headers=HEADERS)

    def _render_index(self) -> str:
        state = status(self._run, self.page_state.now_ns(), MAX_PLAIN)
        plain = _render(state, len(self._run.roster.members) - MAX_PLAIN)
        return assets.index(self._assets, self._run.settings.run_id, plain)

    async def _plain(self, _: web.Request) -> web.Response:
        page = self._renderings.get("/plain", self._render_plain)
        return web.Response(text=page, content_type="text/html", headers=HEADERS)

    def _render_plain(self) -> str:
        state = status(self._run, self.page_state.now_ns())
        return (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>holter {html.escape(state['run_id'])}</title>"
            "<link rel=icon href=web/icon.svg><link rel=stylesheet href=web/page.css>"
            f"<body class=plain><main>{_render(state)}</main>"
        )


def _is_own_origin(request: web.Request) -> bool:
    """Whether a request comes from our own page: browsers send its origin, shells send none."""
    origin = request.headers.get(hdrs.ORIGIN)
    return origin is None or urlsplit(origin).netloc == request.host


async def _request_body(request: web.Request) -> bytes:
    """Return the whole body. Raises OverflowError if it is too long."""
    body = bytearray()
    async for chunk in request.content.iter_chunked(MAX_BODY_BYTES):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise OverflowError
    return bytes(body)


def _encode(content: Any) -> bytes:
    # msgspec writes NaN and Inf as null: JSON has no word for them.
    return msgspec.json.encode(content)


def _json(content: Any, status: int = 200) -> web.Response:
    return _sent(_encode(content), status)


def _sent(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=HEADERS)


def _render(state: dict[str, Any], num_left_out: int = 0) -> str:
    """Return the plainest page that shows how the run is."""
    ranks = _table(RANKS, state["ranks"])
    told = [one | {"report": f"api/v1/incidents/{quote(one['id'], safe='')}/report"} for one in state["incidents"]]
    incidents = _table(INCIDENTS, told) if told else "<p>none</p>"
    notes = "".join(f"<li>{_text(note)}</li>" for note in [*state["blind"], *state["warnings"]])
    rest = f"<p><a href=plain>{num_left_out} more ranks</a></p>" if num_left_out > 0 else ""
    run_id = _text(state["run_id"])
    return f"<h1>{run_id}</h1><h2>Incidents</h2>{incidents}<h2>Ranks</h2>{ranks}{rest}<ul>{notes}</ul>"


def _table(columns: Mapping[str, str], rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{title}</th>" for title in columns.values())
    body = "".join("<tr>" + "".join(_cell(column, row[column]) for column in columns) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(column: str, value: object) -> str:
    return f'<td><a href="{_text(value)}">in full</a></td>' if column == "report" else f"<td>{_text(value)}</td>"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else html.escape(printable(str(value)))


def job_figures(roster: Roster, assembly: Assembly) -> JobFigures:
    """Return the figures of the job as of now."""
    living = [member for member in roster.members.values() if member.state != "ended"]
    overheads = [one.numbers.overhead_ratio for one in living if one.numbers.overhead_ratio is not None]
    moments = [one.progress.moved_ns for one in living if one.progress.moved_ns is not None]
    series, arrivals, vitals = assembly.series(), assembly.arrivals(), assembly.newest_vitals()
    return JobFigures(
        world_size=roster.world_size,
        step=series[-1].step + 1 if series else None,
        sidecars={
            "connected": 0,
            "gone": 0,
            "silent": 0,
            "ended": 0,
            "absent": max(0, roster.world_size - len(roster.members)),
            **Counter(member.state for member in roster.members.values()),
        },
        phases=Counter(one.progress.phase for one in living if one.progress.phase is not None),
        last_progress_s=max(moments) / 1e9 if moments else None,
        lag_s=max((arrival.lag_s for arrival in arrivals[-1].latest), default=0.0) if arrivals else None,
        dropped=roster.dropped,
        overhead_ratio=max(overheads, default=None),
        spreads=_newest(series[-LOOK_BACK:]),
        modules=module_figures(vitals),
        exponents=occupancy(vitals),
    )


def module_figures(told: Sequence[Vitals]) -> tuple[ModuleFigures, ...]:
    """Return each module once, with the largest of each number over the ranks and over its groups of parameters."""
    groups: dict[str, list[ModuleVitals]] = {}
    for vitals in told:
        for module in vitals.modules:
            groups.setdefault(module.module, []).append(module)
    return tuple(
        ModuleFigures(
            module=name,
            gradient_norm=_largest(one.gradient_norm for one in known),
            weight_norm=_largest(one.weight_norm for one in known),
            update_ratio=_largest(one.update_ratio for one in known),
            gradient_zeros=_largest(one.gradient_zeros for one in known),
        )
        for name, known in groups.items()
    )


def occupancy(told: Sequence[Vitals]) -> tuple[float, ...]:
    """Return the share of gradient values in each bucket of exponents, over all modules and ranks that reported them."""
    tables = [module.exponents for vitals in told for module in vitals.modules if module.exponents]
    counts = [sum(column) for column in zip(*tables, strict=False)]
    total = sum(counts)
    return tuple(count / total for count in counts) if total else ()


def snapshot(run: Run) -> CoordinatorSnapshot:
    """Return the state for the exporter."""
    healthy = run.checkpoints.last_healthy()
    return CoordinatorSnapshot(
        halts=run.halts.outcomes,
        last_good_step=None if healthy is None else healthy.step,
        detectors=(*(detector.name for detector in run.judging.runner.detectors), DIAGNOSIS),
        detector_s=run.judging.runner.seconds,
        detector_failures=run.judging.runner.failures,
        findings=tuple((found.detector, found.severity) for found in run.judging.findings),
        open_incidents=tuple(run.incidents.open()),
        opened_s=run.incidents.opened_s(),
        incidents=run.incidents.by_cause(),
        infos=_infos(run),
        num_blind_spots=len(run.blind()),
        webhook=run.deliveries.counts,
        notifications=run.notifications.counts,
        events=run.events.counts,
        job=job_figures(run.roster, run.assembly),
        goodput=run.intake.wall_time.goodput(clock.wall_ns()),
    )


def _newest(series: Sequence[StepNumbers]) -> dict[str, Spread]:
    found = {name: [entry.numbers[name] for entry in series if name in entry.numbers] for name in SPREADS}
    return {name: spreads[-1] for name, spreads in found.items() if spreads}


def _largest(values: Iterable[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _infos(run: Run) -> tuple[IncidentInfo, ...]:
    """Describe the open incidents, most severe first, because only some are described if there are very many."""
    infos = [incident_info(diagnosis, run.settings.link) for diagnosis in run.incidents.settled()]
    return tuple(sorted(infos, key=lambda info: WORST_FIRST.index(info.severity)))
