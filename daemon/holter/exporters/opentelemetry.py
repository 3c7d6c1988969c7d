"""Incidents, findings and halts as OpenTelemetry events, steps as spans: OTLP's JSON, made without its SDK. Pure.

    holter.incident.opened | updated | closed     what, who, where, since when, as attributes
    holter.finding.raised | cleared               a detector's finding, as it comes and goes
    holter.halt                                   how a halt ended

A record is an event by its name and has no body: everything is an attribute. 64-bit integers are text and identifiers hexadecimal, as OTLP's JSON wants.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holter.exporters.alert_text import incident_info
from holter.exporters.incident_news import IncidentNews
from holter.faults.window import StepNumbers
from holter.records import Finding, Severity

SEVERITIES: dict[Severity, tuple[int, str]] = {"info": (9, "INFO"), "warning": (13, "WARN"), "critical": (17, "ERROR")}
"""Severity number and text on OpenTelemetry's own scale."""
MAX_RANKS = 64
"""Number of ranks listed in an attribute; `holter.num_ranks` has the total."""
Attribute = str | int | float | bool | Sequence[int] | Sequence[str]
Record = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """The sender of events."""

    run_id: str
    version: str
    address: str
    """Address that links lead to."""
    resource: Mapping[str, str]
    """Attributes that the user sets: `service.name`, and OTEL_RESOURCE_ATTRIBUTES."""


def incident_event(news: IncidentNews, address: str, now_ns: int) -> Record:
    """Make the event for a change of an incident."""
    one = news.diagnosis
    info = incident_info(one, address)
    first = one.causes[0] if one.causes else None
    told: dict[str, Attribute] = {
        "holter.incident.id": one.id,
        "holter.cause": info.cause,
        "holter.severity": one.severity,
        "holter.symptom": one.symptom,
        "holter.first_step": one.first_step,
        "holter.detected_step": one.detected_step,
        "holter.opened_at": one.opened_at,
        "holter.action": one.action.directive,
        "url.full": info.url,
    }
    if first is not None:
        told |= {
            "holter.confidence": first.confidence,
            "holter.basis": first.basis,
            "holter.ranks": list(first.ranks[:MAX_RANKS]),
            "holter.num_ranks": len(first.ranks),
            "holter.tensors": list(first.tensors[:MAX_RANKS]),
            "holter.fix": first.fix.do,
        }
    if one.action.exit_code is not None:
        told |= {"holter.exit_code": one.action.exit_code, "holter.checkpoint": one.action.checkpoint or ""}
    if one.closed_at is not None:
        told["holter.closed_at"] = one.closed_at
    severity: Severity = "info" if news.change == "closed" else one.severity
    return event(f"holter.incident.{news.change}", severity, told, now_ns)


def finding_event(finding: Finding, now_ns: int, *, is_raised: bool) -> Record:
    """Make the event for a detector's finding that came or went."""
    told: dict[str, Attribute] = {
        "holter.detector": finding.detector,
        "holter.severity": finding.severity,
        "holter.summary": finding.summary,
        "holter.first_step": finding.first_step,
        "holter.ranks": list(finding.ranks[:MAX_RANKS]),
        "holter.num_ranks": len(finding.ranks),
    }
    name = "holter.finding.raised" if is_raised else "holter.finding.cleared"
    return event(name, finding.severity if is_raised else "info", told, now_ns)


def halt_event(outcome: str, text: str, checkpoint: str | None, now_ns: int) -> Record:
    """Make the event for the end of a halt."""
    told = {"holter.outcome": outcome, "holter.text": text, "holter.checkpoint": checkpoint or ""}
    severity: Severity = {"completed": "warning", "called_off": "info"}.get(outcome, "critical")  # type: ignore[assignment]
    return event("holter.halt", severity, told, now_ns)


def event(name: str, severity: Severity, attributes: Mapping[str, Attribute], now_ns: int) -> Record:
    """Make a log record that is an event."""
    number, text = SEVERITIES[severity]
    return {
        "timeUnixNano": str(now_ns),
        "observedTimeUnixNano": str(now_ns),
        "severityNumber": number,
        "severityText": text,
        "eventName": name,
        "attributes": _attributes({"event.name": name, **attributes}),
    }


def step_span(entry: StepNumbers, run_id: str) -> Record | None:
    """Make the span of one step of the whole job; None if no rank reported how long it took."""
    took = entry.numbers.get("seconds")
    if took is None or not took.mean >= 0:
        return None
    told: dict[str, Attribute] = {"holter.step": entry.step, "holter.num_ranks": took.num}
    for name in ("loss", "gradient_norm", "learning_rate"):
        spread = entry.numbers.get(name)
        if spread is not None and spread.num > spread.num_nonfinite:
            told[f"holter.{name}"] = spread.mean
    return {
        "traceId": hashlib.blake2b(run_id.encode(), digest_size=16).hexdigest(),
        "spanId": hashlib.blake2b(f"{run_id}/{entry.step}".encode(), digest_size=8).hexdigest(),
        "name": "holter.step",
        "kind": 1,
        "startTimeUnixNano": str(entry.at_ns - int(took.mean * 1e9)),
        "endTimeUnixNano": str(entry.at_ns),
        "attributes": _attributes(told),
    }


def logs_request(records: Sequence[Record], source: Source) -> Record:
    """Return the body of a request to `/v1/logs`."""
    scope = {"scope": _scope(source), "logRecords": list(records)}
    return {"resourceLogs": [{"resource": _resource(source), "scopeLogs": [scope]}]}


def traces_request(spans: Sequence[Record], source: Source) -> Record:
    """Return the body of a request to `/v1/traces`."""
    return {"resourceSpans": [{"resource": _resource(source), "scopeSpans": [{"scope": _scope(source), "spans": list(spans)}]}]}  # fmt: skip


def _scope(source: Source) -> Record:
    return {"name": "holter", "version": source.version}


def _resource(source: Source) -> Record:
    return {"attributes": _attributes({**source.resource, "holter.run.id": source.run_id})}


def _attributes(told: Mapping[str, Attribute]) -> list[Record]:
    return [{"key": name, "value": _value(value)} for name, value in told.items()]


def _value(value: Attribute) -> Record:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        # JSON has no NaN, but protobuf's JSON has a word for it.
        return {
            "doubleValue": value if value - value == 0 else str(value).replace("inf", "Infinity").replace("nan", "NaN")
        }
    if isinstance(value, str):
        # Text from a script may be invalid Unicode.
        return {"stringValue": value.encode("utf-8", "replace").decode()}
    return {"arrayValue": {"values": [_value(each) for each in value]}}
