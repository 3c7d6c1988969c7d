"""The coordinator's address chooses the transport; a new one is one line."""

import pytest

from holter.transport import choice, wire
from holter.transport.choice import Transport, transport_of
from holter.transport.limits import UplinkSettings
from holter.transport.websocket.uplink import WebSocketUplink


def test_host_and_port_is_a_websocket():
    assert transport_of("node-a:8080") is transport_of("")
    hello = wire.Hello(run_id="r", rank=0, world_size=1, host="h", rank_pid=1, sidecar_pid=2, metrics_address="")
    assert isinstance(
        transport_of("node-a:8080").uplink("node-a:8080", "t", hello, lambda _: None, UplinkSettings()), WebSocketUplink
    )


def test_another_scheme_is_another_transport(monkeypatch):
    toy = Transport(uplink=lambda *_: None, listener=lambda *_: None)
    monkeypatch.setitem(choice.TRANSPORTS, "toy", toy)
    assert toy is transport_of("toy://anywhere")


def test_a_scheme_that_nobody_knows_is_named():
    with pytest.raises(ValueError, match="nats://node-a:4222 needs a transport nats"):
        transport_of("nats://node-a:4222")
