"""An uplink bears every coordinator: absent, silent, talking nonsense, never letting go."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from tests.free_port import free_port

from holter import clock
from holter.records import Observation, Phase, SightLost
from holter.transport import speech as speech_module
from holter.transport import wire
from holter.transport.limits import UplinkSettings, settings_for
from holter.transport.speech import RankSpeech
from holter.transport.uplink import RankUplink
from holter.transport.websocket.carrier import WebSocketCarrier

HELLO = wire.Hello(run_id="r", rank=0, world_size=1, host="h", rank_pid=1, sidecar_pid=2, metrics_address="")
WELCOME = wire.encode(wire.Welcome(run_id="r", run_dir="d"))


def test_the_reports_of_all_ranks_together_are_bounded() -> None:
    assert UplinkSettings() == settings_for(2) == settings_for(4000)
    assert 1.0 == settings_for(16_000).report_interval_s
    assert settings_for(64_000).keepalive_s < 5.0, "a coordinator takes a sidecar for lost after so long"


FAST = UplinkSettings(report_interval_s=0.05, connect_timeout_s=0.5, send_timeout_s=0.5, outbox_limit=100)

Behaviour = Callable[[web.WebSocketResponse], Awaitable[None]]


def record(step: int) -> Observation:
    return Observation(rank=0, step=step, at_ns=0, body=SightLost(what="x", dropped=0))


class Peer:
    """A coordinator's socket that does what a test tells it to."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.heard: list[wire.Upward] = []
        self.connections = 0
        self.behaviour: Behaviour = self.listen
        self._runner: web.AppRunner | None = None

    @property
    def steps(self) -> list[int]:
        reports = [message for message in self.heard if isinstance(message, wire.Report)]
        return [observation.step for report in reports for observation in report.observations]

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/ingest", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def listen(self, line: web.WebSocketResponse) -> None:
        """What a good coordinator does."""
        await line.send_bytes(WELCOME)
        async for frame in line:
            message = wire.decode_upward(frame.data)
            self.heard.append(message)
            if isinstance(message, wire.Goodbye):
                return

    async def _handle(self, request: web.Request) -> web.WebSocketResponse:
        self.connections += 1
        line = web.WebSocketResponse(timeout=0.2)
        await line.prepare(request)
        await line.receive()
        await self.behaviour(line)
        return line


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    made = Peer(free_port())
    yield made
    await made.stop()


def uplink_to(peer: Peer, on_message: Any = lambda _: None, settings: UplinkSettings = FAST) -> RankUplink:
    uplink = RankUplink(f"127.0.0.1:{peer.port}", "t", HELLO, on_message, settings)
    uplink.start()
    return uplink


async def eventually(condition: Callable[[], Any], deadline_s: float = 5.0) -> None:
    began_s = clock.monotonic_s()
    while not condition():
        assert clock.monotonic_s() - began_s < deadline_s, "did not come true in time"
        await asyncio.sleep(0.01)


async def test_records_arrive_in_order_and_goodbye_is_last(peer: Peer) -> None:
    await peer.start()
    uplink = uplink_to(peer)
    for step in range(30):
        uplink.send(record(step))
    uplink.beat(wire.Heartbeat(3, Phase.DATA, 0, 1))
    assert await uplink.close(3.0)
    assert list(range(30)) == peer.steps
    assert isinstance(peer.heard[-1], wire.Goodbye)
    assert any(isinstance(said, wire.Report) and said.heartbeat is not None for said in peer.heard)


async def test_reports_are_batched_and_an_urgent_one_goes_at_once(peer: Peer) -> None:
    await peer.start()
    uplink = uplink_to(peer, settings=UplinkSettings(report_interval_s=0.5))
    await eventually(lambda: uplink.is_connected)
    await asyncio.sleep(0.6)  # the first, empty turn is over
    began_s = clock.monotonic_s()
    for step in range(100):
        uplink.send(record(step))
    await eventually(lambda: len(peer.steps) == 100)
    assert clock.monotonic_s() - began_s > 0.3
    assert sum(isinstance(said, wire.Report) for said in peer.heard) <= 2
    began_s = clock.monotonic_s()
    uplink.send(record(100), urgent=True)
    await eventually(lambda: len(peer.steps) == 101)
    assert clock.monotonic_s() - began_s < 0.3
    await uplink.close(1.0)


async def test_what_finds_no_room_while_nobody_listens_is_counted_and_told(peer: Peer) -> None:
    uplink = uplink_to(peer)
    uplink.dropped_before = 7
    for step in range(150):
        uplink.send(record(step))
    assert 50 == uplink.dropped
    await peer.start()
    assert await uplink.close(5.0)
    assert list(range(50, 150)) == peer.steps
    assert 57 == max(said.dropped for said in peer.heard if isinstance(said, wire.Report))


async def test_it_comes_back_after_every_loss(peer: Peer) -> None:
    await peer.start()
    uplink = uplink_to(peer)
    uplink.send(record(0))
    await eventually(lambda: peer.steps)
    await peer.stop()
    await eventually(lambda: not uplink.is_connected)
    uplink.send(record(1))
    await peer.start()
    await eventually(lambda: 1 in peer.steps)
    assert uplink.reconnects >= 1
    await uplink.close(1.0)


async def test_a_question_is_answered_and_a_failing_answer_is_none(peer: Peer) -> None:
    async def ask(line: web.WebSocketResponse) -> None:
        await line.send_bytes(WELCOME)
        for request, step in ((1, 5), (2, -1), (3, 5)):
            await line.send_bytes(wire.encode(wire.Fetch(request=request, tensor_class="g", step=step)))
        async for frame in line:
            peer.heard.append(wire.decode_upward(frame.data))

    def answer(message: wire.Downward) -> wire.Upward | None:
        if not isinstance(message, wire.Fetch):
            return None
        if message.step < 0:
            raise ValueError("the owner's own fault")
        return wire.Fetched(request=message.request, observation=record(message.step))

    peer.behaviour = ask
    await peer.start()
    uplink = uplink_to(peer, answer)
    await eventually(lambda: len(peer.heard) == 2)
    assert [1, 3] == [said.request for said in peer.heard if isinstance(said, wire.Fetched)]
    assert uplink.is_connected
    await uplink.close(0.1)


async def _nonsense(line: web.WebSocketResponse) -> None:
    await line.send_bytes(WELCOME)
    for _ in range(100):
        await line.send_bytes(b"\xc1nonsense")
    await asyncio.sleep(10)


async def _huge(line: web.WebSocketResponse) -> None:
    await line.send_bytes(WELCOME)
    await line.send_bytes(b"\x00" * (wire.MAX_FRAME_BYTES + 1))
    await asyncio.sleep(10)


async def _silent(_: web.WebSocketResponse) -> None:
    await asyncio.sleep(10)


async def _curt(line: web.WebSocketResponse) -> None:
    await line.close()


async def _refusing(line: web.WebSocketResponse) -> None:
    await line.close(code=wire.REFUSED, message=b"wrong run")


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", [_nonsense, _huge, _silent, _curt, _refusing], ids=lambda one: one.__name__[1:])
async def test_a_broken_coordinator_is_left_and_tried_again(peer: Peer, behaviour: Behaviour) -> None:
    peer.behaviour = behaviour
    await peer.start()
    uplink = uplink_to(peer)
    uplink.send(record(1))
    await eventually(lambda: peer.connections >= 2)
    assert ("wrong run" if behaviour is _refusing else "") == uplink.refusal
    peer.behaviour = peer.listen
    await eventually(lambda: uplink.is_connected)
    assert await uplink.close(5.0)


async def test_a_coordinator_that_turns_us_away_does_not_watch_us(peer: Peer) -> None:
    """A second job that was sent to the first one's coordinator must not look watched."""
    peer.behaviour = _refusing
    await peer.start()
    uplink = uplink_to(peer)
    await eventually(lambda: peer.connections > 1 and uplink.refusal)
    assert 0.0 == uplink.heard_s
    peer.behaviour = peer.listen
    await eventually(lambda: uplink.heard_s)
    assert await uplink.close(3.0)


async def test_an_agent_that_hears_the_coordinator_does_not_speak_for_who_was_turned_away() -> None:
    """An agent lets a sidecar in at once, and the coordinator's refusal comes behind."""
    carrier = WebSocketCarrier("unix:/nowhere", "t", RankSpeech(HELLO, 10), lambda _: None)
    carrier.refusal, carrier._since_s = "another process speaks for rank 0", clock.monotonic_s()
    heard = wire.Relayed(is_connected=True, ago_s=0.0)
    carrier._hear_of_coordinator(heard)
    assert 0.0 == carrier.heard_s
    carrier._since_s -= UplinkSettings().steady_after_s
    carrier._hear_of_coordinator(heard)
    assert ("", True) == (carrier.refusal, carrier.heard_s > 0.0)


async def test_one_of_two_processes_under_a_rank_gives_way(peer: Peer) -> None:
    async def replace(line: web.WebSocketResponse) -> None:
        await line.send_bytes(WELCOME)
        await line.close(code=wire.REPLACED, message=b"another took over")

    peer.behaviour = replace
    await peer.start()
    uplink = uplink_to(peer)
    await eventually(lambda: uplink.refusal)
    await asyncio.sleep(0.5)
    assert (1, "another took over") == (peer.connections, uplink.refusal)
    assert not await uplink.close(0.1)


async def test_goodbye_is_said_again_when_the_line_broke_before_it_was_acknowledged(peer: Peer) -> None:
    async def drop(line: web.WebSocketResponse) -> None:
        await line.send_bytes(WELCOME)
        while not isinstance(wire.decode_upward((await line.receive()).data), wire.Goodbye):
            pass
        peer.behaviour = peer.listen
        assert line._req is not None
        assert line._req.transport is not None
        line._req.transport.abort()

    peer.behaviour = drop
    await peer.start()
    uplink = uplink_to(peer)
    uplink.send(record(0))
    assert await uplink.close(3.0)
    assert isinstance(peer.heard[-1], wire.Goodbye)


async def test_a_coordinator_that_never_lets_go_costs_the_deadline_and_no_more(peer: Peer) -> None:
    async def cling(line: web.WebSocketResponse) -> None:
        await line.send_bytes(WELCOME)
        while True:
            await line.receive()
            await asyncio.sleep(0.01)

    peer.behaviour = cling
    await peer.start()
    uplink = uplink_to(peer)
    await eventually(lambda: uplink.is_connected)
    began_s = clock.monotonic_s()
    assert not await uplink.close(0.3)
    assert clock.monotonic_s() - began_s < 2.0


async def test_nobody_there_costs_the_deadline_and_no_more(peer: Peer) -> None:
    uplink = uplink_to(peer)
    began_s = clock.monotonic_s()
    assert not await uplink.close(0.3)
    assert clock.monotonic_s() - began_s < 1.0


@pytest.mark.slow
async def test_closing_leaves_no_task_behind_whatever_moment_it_comes_at(peer: Peer) -> None:
    await peer.start()
    peer.behaviour = _curt
    for moment in range(40):
        uplink = uplink_to(peer)
        await asyncio.sleep(moment * 0.002)
        await uplink.close(0.0)
        task = uplink._carrier._task  # type: ignore[attr-defined]
        assert task.done()


async def test_a_record_too_large_for_any_frame_is_dropped_and_counted(peer: Peer) -> None:
    await peer.start()
    uplink = uplink_to(peer)
    huge = Observation(rank=0, step=1, at_ns=0, body=SightLost(what="x" * wire.MAX_FRAME_BYTES, dropped=0))
    for observation in (record(0), huge, record(2)):
        uplink.send(observation)
    assert await uplink.close(5.0)
    assert ([0, 2], 1) == (peer.steps, uplink.dropped)


async def test_a_sidecar_with_nothing_to_say_still_speaks(peer: Peer) -> None:
    await peer.start()
    uplink = uplink_to(peer, settings=UplinkSettings(report_interval_s=0.05, keepalive_s=0.1))
    await eventually(lambda: len(peer.heard) >= 3)
    assert peer.heard == [wire.Report(heartbeat=None, observations=[], dropped=0)] * len(peer.heard)
    assert await uplink.close(3.0)
    num_said = len(peer.heard)
    await asyncio.sleep(0.3)
    assert num_said == len(peer.heard), "after Goodbye there is nothing to be kept alive"


def telling(peer: Peer, boot_id: str, ahead_ns: int = 0) -> Behaviour:
    """A coordinator whose clock is ahead."""

    async def tell(line: web.WebSocketResponse) -> None:
        await line.send_bytes(wire.encode(wire.Welcome(run_id="r", run_dir="d", boot_id=boot_id)))
        async for frame in line:
            message = wire.decode_upward(frame.data)
            peer.heard.append(message)
            if isinstance(message, wire.ClockAsked):
                now_ns = clock.wall_ns() + ahead_ns
                told = wire.ClockTold(sent_ns=message.sent_ns, received_ns=now_ns, replied_ns=now_ns)
                await line.send_bytes(wire.encode(told))

    return tell


CURIOUS = UplinkSettings(report_interval_s=0.02, keepalive_s=0.05, clock_first_s=0.05)


async def test_the_clock_of_another_host_is_asked_for(peer: Peer) -> None:
    ahead_ns = 90 * 10**9
    peer.behaviour = telling(peer, "another boot", ahead_ns)
    await peer.start()
    seen: list[wire.Downward] = []
    uplink = uplink_to(peer, seen.append, settings=CURIOUS)
    await eventually(lambda: uplink.clock.num_answers >= 4)
    assert abs(uplink.clock.offset_ns - ahead_ns) <= uplink.clock.error_ns < 5 * 10**9
    assert [wire.Welcome] == [type(message) for message in seen], "the owner is not bothered"
    await uplink.close(0.2)


async def test_the_own_hosts_clock_needs_no_question(peer: Peer) -> None:
    peer.behaviour = telling(peer, clock.clock_id())
    await peer.start()
    uplink = uplink_to(peer, settings=CURIOUS)
    await eventually(lambda: len(peer.heard) >= 5)
    assert (0, 0) == (uplink.clock.offset_ns, uplink.clock.error_ns)
    assert not [said for said in peer.heard if isinstance(said, wire.ClockAsked)]
    await uplink.close(0.2)


async def test_a_coordinator_that_does_not_know_the_question_is_not_asked(peer: Peer) -> None:
    await peer.start()
    uplink = uplink_to(peer, settings=CURIOUS)
    await eventually(lambda: len(peer.heard) >= 5)
    assert not [said for said in peer.heard if isinstance(said, wire.ClockAsked)]
    assert uplink.clock.error_ns > 10**15, "and nothing is claimed"
    await uplink.close(1.0)


@pytest.mark.parametrize(("recent_s", "expected"), [(3.0, [0, 1, 2, 3]), (0.0, [3])])
def test_what_an_agent_passed_on_a_moment_ago_is_said_again_should_it_die_with_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, recent_s: float, expected: list[int]
) -> None:
    """A coordinator writes once a second: both may be gone before it did."""
    monkeypatch.setattr(speech_module, "RECENT_S", recent_s)
    speech = RankSpeech(HELLO, 100)
    speech.is_kept = True
    speech.begin()
    for step in range(4):
        speech.send(record(step))
    speech.next_frame(100)
    speech.note_passed(3)
    time.sleep(0.01)
    speech.note_passed(3)
    speech.begin()
    said, _ = speech.next_frame(100)
    assert expected == [observation.step for observation in said]
