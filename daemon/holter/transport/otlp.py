"""Where events for OpenTelemetry go; `config.otlp` reads it from OpenTelemetry's own variables."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OtlpSettings:
    """A collector that speaks OTLP over HTTP."""

    logs: str
    """Address for `/v1/logs`, whole."""
    traces: str
    """The same for spans."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 10.0
    resource: Mapping[str, str] = field(default_factory=dict)
    """What the user says of the service."""
