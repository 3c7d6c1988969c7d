"""Events as the official protocol has them: the proto's own parser takes them, field by field."""

import base64
import json
import math

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.exporters.test_phone_text import diagnosis

from holter.exporters.incident_news import IncidentNews
from holter.exporters.opentelemetry import (
    Source,
    event,
    finding_event,
    halt_event,
    incident_event,
    logs_request,
    step_span,
    traces_request,
)
from holter.faults.window import Spread, StepNumbers
from holter.records import Finding

SOURCE = Source("gpt-7", "0.1.0", "https://head.example", {"service.name": "training", "team": "a"})


def parsed(records):
    """What the proto's parser makes of the request; it refuses fields that are not the protocol's."""
    body = json.loads(json.dumps(logs_request(records, SOURCE), allow_nan=False))
    return json_format.ParseDict(body, ExportLogsServiceRequest()).resource_logs[0]


def plain(attributes):
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = (
            [getattr(each, each.WhichOneof("value")) for each in value.values] if kind == "array_value" else value
        )
    return found


@pytest.mark.parametrize(
    ("change", "severity", "expected"),
    [("opened", "critical", 17), ("updated", "warning", 13), ("closed", "critical", 9), ("opened", "info", 9)],
)
def test_an_incident_is_an_event_whose_facts_are_attributes(change, severity, expected):
    logs = parsed(
        [incident_event(IncidentNews(change, diagnosis(severity=severity)), SOURCE.address, 1_763_287_200 * 10**9)]
    )
    (record,) = logs.scope_logs[0].log_records
    assert (f"holter.incident.{change}", expected) == (record.event_name, record.severity_number)
    assert not record.HasField("body")
    assert 1_763_287_200 * 10**9 == record.time_unix_nano
    told = plain(record.attributes)
    assert ("nonfinite_input", [1], 30) == (told["holter.cause"], told["holter.ranks"], told["holter.first_step"])
    assert "https://head.example/#incident=20261115T101500-1" == told["url.full"]
    assert {"service.name": "training", "team": "a", "holter.run.id": "gpt-7"} == plain(logs.resource.attributes)
    assert ("holter", "0.1.0") == (logs.scope_logs[0].scope.name, logs.scope_logs[0].scope.version)


def test_findings_and_halts_are_events_too():
    finding = Finding(
        detector="slow_rank", severity="warning", first_step=7, detected_step=9, ranks=(3,), summary="slow"
    )
    records = [
        finding_event(finding, 5, is_raised=True),
        finding_event(finding, 6, is_raised=False),
        halt_event("completed", "halted after 31 steps", "checkpoints/31", 7),
        halt_event("failed", "no disk", None, 8),
    ]
    found = parsed(records).scope_logs[0].log_records
    assert ["holter.finding.raised", "holter.finding.cleared", "holter.halt", "holter.halt"] == [
        one.event_name for one in found
    ]
    assert [13, 9, 13, 17] == [one.severity_number for one in found]


@pytest.mark.parametrize(
    "value", [True, 2**62, -1, 0.5, math.nan, math.inf, -math.inf, "\ud800 \x00 é", [1, 2], ["a"], []]
)
def test_every_value_passes_through_the_official_parser(value):
    (record,) = parsed([event("holter.test", "info", {"it": value}, 1)]).scope_logs[0].log_records
    found = plain(record.attributes)["it"]
    assert type(found) is type(value)
    assert found == value or isinstance(value, str) or math.isnan(value)


def test_a_step_is_a_span_as_long_as_it_took():
    seconds = Spread(0.25, 0.2, 0.3, 0, 1, 2)
    entry = StepNumbers(40, 10 * 10**9, {"seconds": seconds, "loss": Spread(1.5, 1.0, 2.0, 0, 1, 2)})
    span = step_span(entry, "gpt-7")
    assert span is not None
    body = json.loads(json.dumps(traces_request([span], SOURCE)))
    for one in body["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        # OTLP's JSON has identifiers in hexadecimal, protobuf's own in base 64.
        for name in ("traceId", "spanId"):
            one[name] = base64.b64encode(bytes.fromhex(one[name])).decode()
    (found,) = json_format.ParseDict(body, ExportTraceServiceRequest()).resource_spans[0].scope_spans[0].spans
    assert (16, 8, "holter.step") == (len(found.trace_id), len(found.span_id), found.name)
    assert 250_000_000 == found.end_time_unix_nano - found.start_time_unix_nano
    assert {"holter.step": 40, "holter.num_ranks": 2, "holter.loss": 1.5} == plain(found.attributes)
    assert step_span(StepNumbers(41, 0, {}), "gpt-7") is None
