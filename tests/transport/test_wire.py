"""Messages survive the journey, and nothing else is taken for one."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.records import Observation, Phase, SightLost
from holter.transport import wire

UPWARD: list[wire.Upward] = [
    wire.Hello(run_id="r", rank=1, world_size=2, host="h", rank_pid=3, sidecar_pid=4, metrics_address="h:1"),
    wire.Report(
        heartbeat=wire.Heartbeat(4, Phase.FORWARD, 1, 99),
        observations=[Observation(rank=1, step=2, at_ns=3, body=SightLost(what="x", dropped=1))],
        dropped=5,
    ),
    wire.Fetched(request=1, observation=None),
    wire.ClockAsked(sent_ns=1),
    wire.Goodbye(),
    wire.AgentHello(run_id="r", host="h", agent_pid=3),
    wire.HostReport(
        heartbeats=[(1, wire.Heartbeat(4, Phase.FORWARD, 1, 99))],
        observations=[Observation(rank=1, step=2, at_ns=3, body=SightLost(what="x", dropped=1))],
        dropped=[(1, 5)],
        quiet=[2],
        goodbyes=[3],
        left=[(4, True)],
    ),
]
DOWNWARD: list[wire.Downward] = [
    wire.Welcome(run_id="r", run_dir="d"),
    wire.Fetch(request=1, tensor_class="gradients", step=3),
    wire.Notice(severity="critical", text="t"),
    wire.Examine(asked_ns=5, depth="native"),
    wire.ClockTold(sent_ns=1, received_ns=2, replied_ns=3),
    wire.ToRanks(ranks=[1, 2], message=wire.Examine(asked_ns=5, depth="quick")),
    wire.Released(rank=1, code=wire.REFUSED, reason="no"),
    wire.Relayed(is_connected=True, ago_s=0.5),
]


@pytest.mark.parametrize("message", UPWARD, ids=lambda message: type(message).__name__)
def test_what_a_sidecar_says_arrives(message: wire.Upward) -> None:
    assert message == wire.decode_upward(wire.encode(message))


@pytest.mark.parametrize("message", DOWNWARD, ids=lambda message: type(message).__name__)
def test_what_the_coordinator_says_arrives(message: wire.Downward) -> None:
    assert message == wire.decode_downward(wire.encode(message))


def test_a_newer_side_may_say_more() -> None:
    content = msgspec.msgpack.decode(wire.encode(DOWNWARD[2]))
    assert DOWNWARD[2] == wire.decode_downward(msgspec.msgpack.encode({**content, "colour": "red"}))


@given(st.binary(max_size=200))
def test_garbage_is_refused_by_the_one_kind_of_error(frame: bytes) -> None:
    try:
        message = wire.decode_upward(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    assert isinstance(message, wire.Upward), "what is not refused is a message"
