"""The collector to which OpenTelemetry events go; `config.otlp` reads it from OpenTelemetry's own variables."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OtlpSettings:
    """A collector that speaks OTLP over HTTP."""

    logs: str
    """Full address for logs, ending in `/v1/logs`."""
    traces: str
    """Full address for spans."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 10.0
    resource: Mapping[str, str] = field(default_factory=dict)
    """Attributes that the user sets for the service."""
