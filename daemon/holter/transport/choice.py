"""Which transport is used: the scheme of the coordinator's address says it. To add one, add a line to TRANSPORTS."""

from collections.abc import Callable
from dataclasses import dataclass

from holter.transport.interface import CarrierMaker, Listener
from holter.transport.nats.carrier import NatsCarrier
from holter.transport.nats.listener import NatsListener
from holter.transport.websocket.carrier import UNIX, WebSocketCarrier
from holter.transport.websocket.listener import WebSocketListener

__all__ = ["TRANSPORTS", "UNIX", "Transport", "transport_of"]


@dataclass(frozen=True)
class Transport:
    """Makes the two ends of one transport."""

    carrier: CarrierMaker
    listener: Callable[..., Listener]
    """(receiver, token, on_urgent, hold), and by name what else the transport needs."""


TRANSPORTS = {
    "": Transport(WebSocketCarrier, WebSocketListener),
    "nats": Transport(NatsCarrier, NatsListener),
    "tls": Transport(NatsCarrier, NatsListener),
}
"""By the scheme of an address; `host:port` has none."""


def transport_of(address: str) -> Transport:
    """For `host:port`, the same by TLS as `https://host:port`, `unix:` and a path, or `scheme://...`."""
    scheme = address.partition("://")[0] if "://" in address else ""
    scheme = "" if scheme == "https" else scheme
    if scheme not in TRANSPORTS:
        raise ValueError(f"the coordinator's address {address} needs a transport {scheme}, which there is not")
    return TRANSPORTS[scheme]
