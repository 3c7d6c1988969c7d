"""Sends events to an OpenTelemetry collector over OTLP/HTTP: what is new since the last look, in a courier's thread."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holter.coordinator.courier import Courier
from holter.coordinator.http.status import halt
from holter.coordinator.run import Run
from holter.exporters.incident_news import NewsDesk
from holter.exporters.opentelemetry import (
    Record,
    Source,
    finding_event,
    halt_event,
    incident_event,
    logs_request,
    step_span,
    traces_request,
)
from holter.faults.window import StepNumbers
from holter.records import Diagnosis, Finding
from holter.transport.otlp import OtlpSettings

MAX_EVENTS = 256
"""Largest number of events in one request; if there are more, the oldest are dropped and counted."""
MAX_SPANS = 256


@dataclass(frozen=True)
class OtlpPost:
    """One request to send."""

    url: str
    body: bytes


class EventExport:
    """Exports the events of a run: `start`, `look` often, `close`."""

    def __init__(self, run: Run, settings: OtlpSettings, version: str, step_spans: int = 0) -> None:
        self._run, self._settings, self._every = run, settings, step_spans
        about = run.settings
        self._source = Source(about.run_id, version, about.link, settings.resource)
        self._desk = NewsDesk()
        self._courier = Courier("the collector of OpenTelemetry", self._post, run.events)
        self._findings: dict[tuple[str, tuple[int, ...]], Finding] = {}
        self._outcomes: Mapping[str, int] = {}
        self._spanned = -1

    def start(self, left_open: Sequence[Diagnosis]) -> None:
        """Begin; `left_open` are incidents that a former life of the run told about."""
        self._desk.remember(left_open)
        self._courier.start()

    def look(self, standing: Sequence[Diagnosis], known: Sequence[Diagnosis], now_ns: int) -> None:
        """Send what is new; returns at once."""
        news = self._desk.look(standing, known)
        events = [incident_event(one, self._source.address, now_ns) for one in news]
        events += [*self._of_findings(now_ns), *self._of_halts(now_ns)]
        for _ in events[:-MAX_EVENTS]:
            self._run.events.count("dropped", "too many events at once")
        if events:
            self._send(self._settings.logs, logs_request(events[-MAX_EVENTS:], self._source))
        if self._every:
            self._send_spans(self._run.assembly.series())

    def close(self, deadline_s: float) -> None:
        """Block until everything is sent, at most for `deadline_s`."""
        self._courier.close(deadline_s)

    def _of_findings(self, now_ns: int) -> list[Record]:
        stand = {(one.detector, one.ranks): one for one in self._run.judging.findings if not one.needs}
        raised = [finding_event(one, now_ns, is_raised=True) for key, one in stand.items() if key not in self._findings]
        gone = [finding_event(one, now_ns, is_raised=False) for key, one in self._findings.items() if key not in stand]
        self._findings = stand
        return raised + gone

    def _of_halts(self, now_ns: int) -> list[Record]:
        outcomes = dict(self._run.halts.outcomes)
        fresh = [name for name, number in outcomes.items() if number > self._outcomes.get(name, 0)]
        self._outcomes = outcomes
        said = (halt(self._run) or {}) if fresh else {}
        return [halt_event(name, str(said.get("text") or ""), said.get("checkpoint"), now_ns) for name in fresh]

    def _send_spans(self, series: Sequence[StepNumbers]) -> None:
        # Other ranks may still report the newest step.
        fresh = [one for one in series[:-1] if one.step > self._spanned]
        if not fresh:
            return
        self._spanned = fresh[-1].step
        spans = [span for one in fresh if one.step % self._every == 0 and (span := step_span(one, self._source.run_id))]
        if spans:
            self._send(self._settings.traces, traces_request(spans[-MAX_SPANS:], self._source))

    def _send(self, url: str, body: Record) -> None:
        self._courier.send(OtlpPost(url, msgspec.json.encode(body)))

    def _post(self, one: OtlpPost) -> str:
        """Send a request and return why it failed, or an empty string. Headers may hold a secret and are never mentioned."""
        headers = {"Content-Type": "application/json", **self._settings.headers}
        request = urllib.request.Request(one.url, one.body, headers, method="POST")  # noqa: S310 - http and https alone, by config
        try:
            with _OPENER.open(request, timeout=self._settings.timeout_s) as answer:
                answer.read(2**16)
        except urllib.error.HTTPError as error:
            error.close()
            return f"HTTP {error.code}"
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would carry the headers, and perhaps a key, to somebody else."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
