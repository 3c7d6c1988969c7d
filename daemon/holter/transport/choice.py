"""Which transport is used: the scheme of the coordinator's address says it. To add one, add a line to TRANSPORTS."""

from collections.abc import Callable
from dataclasses import dataclass

from holter.transport.interface import ListenerMaker, OnMessage, Uplink
from holter.transport.limits import UplinkSettings
from holter.transport.websocket.listener import WebSocketListener
from holter.transport.websocket.uplink import WebSocketUplink
from holter.transport.wire import Hello


@dataclass(frozen=True)
class Transport:
    """Makes the two ends of one transport."""

    uplink: Callable[[str, str, Hello, OnMessage, UplinkSettings], Uplink]
    """(address, token, hello, on_message, settings)"""
    listener: ListenerMaker


TRANSPORTS = {"": Transport(WebSocketUplink, WebSocketListener)}
"""By the scheme of an address; `host:port` has none."""


def transport_of(address: str) -> Transport:
    """For `host:port`, the same by TLS as `https://host:port`, or `scheme://...`."""
    scheme = address.partition("://")[0] if "://" in address else ""
    scheme = "" if scheme == "https" else scheme
    if scheme not in TRANSPORTS:
        raise ValueError(f"the coordinator's address {address} needs a transport {scheme}, which there is not")
    return TRANSPORTS[scheme]
