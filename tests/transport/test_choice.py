"""The coordinator's address chooses the transport; a new one is one line."""

import pytest

from holter.transport import choice, wire
from holter.transport.choice import Transport, transport_of
from holter.transport.limits import UplinkSettings
from holter.transport.speech import RankSpeech
from holter.transport.websocket.carrier import WebSocketCarrier


def test_host_and_port_is_a_websocket():
    assert transport_of("node-a:8080") is transport_of("")
    hello = wire.Hello(run_id="r", rank=0, world_size=1, host="h", rank_pid=1, sidecar_pid=2, metrics_address="")
    carry = transport_of("node-a:8080").carrier
    assert isinstance(
        carry("node-a:8080", "t", RankSpeech(hello, 9), lambda _: None, UplinkSettings()), WebSocketCarrier
    )


def test_the_agent_of_this_host_is_a_websocket_too():
    assert transport_of("unix:/run/agent.sock") is transport_of("")


def test_another_scheme_is_another_transport(monkeypatch):
    toy = Transport(carrier=lambda *_: None, listener=lambda *_: None)
    monkeypatch.setitem(choice.TRANSPORTS, "toy", toy)
    assert toy is transport_of("toy://anywhere")


def test_a_scheme_that_nobody_knows_is_named():
    with pytest.raises(ValueError, match="carrier://node-a:4222 needs a transport carrier"):
        transport_of("carrier://node-a:4222")
