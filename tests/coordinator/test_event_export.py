"""Events to a collector: a real coordinator, real requests, read by the official proto's parser."""

import json

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from tests.coordinator.outside import http_server
from tests.exporters.test_opentelemetry import plain
from tests.exporters.test_phone_text import diagnosis

from holter.config import otlp
from holter.coordinator import courier
from holter.coordinator.event_export import EventExport
from holter.coordinator.identity import RunSettings
from holter.coordinator.run import Run


@pytest.fixture
def run(tmp_path):
    made = Run(RunSettings(tmp_path, "gpt-7", "http://127.0.0.1:9", 2, public_url="https://head.example/"))
    yield made
    made.close(5.0)


def events(server):
    """(name, attributes) of all that came."""
    found = []
    for path, _, body in server.posts:
        assert "/v1/logs" == path
        told = json_format.ParseDict(json.loads(body), ExportLogsServiceRequest())
        records = told.resource_logs[0].scope_logs[0].log_records
        found += [(record.event_name, plain(record.attributes)) for record in records]
    return found


def test_what_is_new_is_sent_once_with_the_users_headers(run):
    with http_server() as server:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.port}/",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20secret,x=1",
            "OTEL_SERVICE_NAME": "training",
        }
        settings, said = otlp(environ)
        assert not said
        assert "secret" not in repr(settings)
        export = EventExport(run, settings, "0.1.0")
        export.start([])
        for standing in ([diagnosis()], [diagnosis()], []):
            export.look(standing, [diagnosis(closed_at=None if standing else "2026-11-15T10:20:00Z")], 5)
        export.close(30)
    assert ["holter.incident.opened", "holter.incident.closed"] == [name for name, _ in events(server)]
    assert "https://head.example/#incident=20261115T101500-1" == events(server)[0][1]["url.full"]
    assert ("a secret", "1", "application/json") == tuple(
        server.posts[0][1][name] for name in ("api-key", "x", "content-type")
    )
    assert {"delivered": 2} == run.events.counts


@pytest.mark.parametrize("status", [302, 401, 503])
def test_a_collector_that_takes_nothing_is_counted_and_follows_no_redirect(run, monkeypatch, status):
    monkeypatch.setattr(courier, "FIRST_PAUSE_S", 0.01)
    with http_server() as server:
        server.status = status
        settings, _ = otlp({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": f"http://127.0.0.1:{server.port}/v1/logs"})
        export = EventExport(run, settings, "0.1.0")
        export.start([])
        export.look([diagnosis()], [diagnosis()], 5)
        export.close(30)
    assert {"failed": courier.MAX_ATTEMPTS, "dropped": 1} == run.events.counts
    assert (
        f"OpenTelemetry: {courier.MAX_ATTEMPTS} attempts failed, 1 messages lost, last HTTP {status}" in run.warnings()
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318/v1/logs"),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c:4318/x"}, "http://c:4318/x"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_LOGS_EXPORTER": "none"}, None),
    ],
)
def test_the_addresses_are_opentelemetrys_own(environ, expected):
    found, said = otlp(environ)
    assert not said
    assert expected == (found.logs if found else None)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "protocol is grpc"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4317"}, "http:// or https://"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "milliseconds"),
    ],
)
def test_what_cannot_take_effect_says_so(more, words):
    _, (said,) = otlp({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", **more})
    assert words in said


def test_its_timeout_is_in_milliseconds():
    settings, _ = otlp({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_TIMEOUT": "2500"})
    assert 2.5 == settings.timeout_s
