"""The choice of the transport by the scheme of the coordinator's address. To add a transport, add a line to TRANSPORTS."""

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
    """The makers of the two ends of a transport."""

    carrier: CarrierMaker
    listener: Callable[..., Listener]
    """Called with (receiver, token, on_urgent, hold), and by name with whatever else the transport needs."""


TRANSPORTS = {
    "": Transport(WebSocketCarrier, WebSocketListener),
    "nats": Transport(NatsCarrier, NatsListener),
    "tls": Transport(NatsCarrier, NatsListener),
}
"""Transports by the scheme of an address; `host:port` has none."""


def transport_of(address: str) -> Transport:
    """Return the transport of an address: `host:port`, `https://host:port`, `unix:` and a path, or `scheme://...`."""
    scheme = address.partition("://")[0] if "://" in address else ""
    scheme = "" if scheme == "https" else scheme
    if scheme not in TRANSPORTS:
        raise ValueError(f"the coordinator's address {address} needs a transport {scheme}, which there is not")
    return TRANSPORTS[scheme]
