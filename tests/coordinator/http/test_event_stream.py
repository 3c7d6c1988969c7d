"""Server-sent events over real sockets, and the one request that can be made."""

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from tests.coordinator.conftest import HALT_TOKEN, TOKEN, Running, SimulatedRank, eventually

from holter import clock
from holter.coordinator.http.pages import MAX_BODY_BYTES, MAX_PLAIN
from holter.coordinator.service import Limits
from holter.records import Nonfinite
from holter.status_page import event_stream
from holter.transport import wire

NAN = Nonfinite(where="input", name="batch['x']", nans=3, infs=0, numel=64)


class Reader:
    """As an EventSource reads."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.state: dict[str, Any] = {}
        self.names: list[str] = []

    async def next(self) -> tuple[str, dict[str, Any]]:
        name = ""
        async with asyncio.timeout(10):
            async for raw in self._response.content:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    told = json.loads(line.removeprefix("data: "))
                    self.names.append(name)
                    self._apply(name, told)
                    return name, told
        raise EOFError

    async def until(self, condition: Any) -> None:
        while not condition(self.state):
            await self.next()

    def _apply(self, name: str, told: dict[str, Any]) -> None:
        if name == "snapshot":
            self.state = told
        if name == "delta":
            self.state |= {key: told[key] for key in told if key not in {"columns", "more", "happened"}}
            for column, change in told.get("columns", {}).items():
                self._change(column, change)
            for series, rows in told.get("more", {}).items():
                self.state["series"][series] += rows
            self.state["timeline"] += told.get("happened", [])

    def _change(self, column: str, change: Any) -> None:
        if isinstance(change, list):
            self.state["columns"][column] = change
            return
        for rank, value in zip(change["at"], change["to"], strict=True):
            self.state["columns"][column][rank] = value


async def training(running: Running, num_steps: int = 5) -> list[SimulatedRank]:
    ranks = [running.rank(rank) for rank in range(2)]
    for rank in ranks:
        rank.attach()
        for step in range(num_steps):
            rank.step(step)
    await eventually(
        lambda: [m.progress.step for m in running.coordinator.watched.roster.members.values()] == [num_steps] * 2
    )
    return ranks


async def test_the_whole_comes_first_then_what_changes(run_coordinator: Any) -> None:
    running = await run_coordinator()
    ranks = await training(running)
    url = f"http://127.0.0.1:{running.port}/api/v1/events"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert "text/event-stream" == response.content_type
        assert "no-store" == response.headers["Cache-Control"]
        reader = Reader(response)
        name, told = await reader.next()
        assert ("snapshot", 5, True) == (name, told["about"]["step"], told["about"]["is_live"])
        assert [1, 1] == told["columns"]["state"]
        assert list(range(5)) == [row[0] for row in told["series"]["loss"]]
        for rank in ranks:
            rank.step(5)
            rank.step(6, nonfinite=[NAN] if rank.rank == 1 else None)
        await reader.until(lambda state: state["incidents"] and state["about"]["step"] == 7)
        assert [0, 2] == reader.state["columns"]["blame"]
        await reader.until(lambda state: len(state["series"]["loss"]) == 7)
        assert any(one["kind"] == "incident" for one in reader.state["timeline"])
        assert ["snapshot"] == [one for one in reader.names if one == "snapshot"]


async def test_a_report_is_a_fragment_without_style_or_script(run_coordinator: Any) -> None:
    running = await run_coordinator()
    ranks = await training(running)
    hostile = Nonfinite(where="input", name="<script>alert(1)</script>", nans=3, infs=0, numel=64)
    for rank in ranks:
        rank.step(5, nonfinite=[hostile] if rank.rank == 1 else None)
    found = (await eventually(running.coordinator.watched.incidents.all))[0]
    code, page = await running.get(f"/api/v1/incidents/{found.id}/report")
    assert 200 == code
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert "style=" not in page
    assert "<h2" in page
    assert 404 == (await running.get("/api/v1/incidents/other/report"))[0]


async def test_the_end_is_told_with_the_last_of_it(run_coordinator: Any) -> None:
    running = await run_coordinator(limits=Limits(settle_s=0.0))
    ranks = await training(running)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{running.port}/api/v1/events") as response,
    ):
        reader = Reader(response)
        await reader.next()
        await asyncio.gather(*(rank.end(5) for rank in ranks))
        while (await reader.next())[0] != "end":
            pass
        assert [2, 2] == reader.state["columns"]["state"]
    await asyncio.wait_for(running.task, 10)


async def test_who_comes_after_the_end_is_shown_the_whole_and_told_that_it_was_the_last(run_coordinator: Any) -> None:
    running = await run_coordinator(limits=Limits(settle_s=0.0, linger_s=60.0))
    ranks = await training(running)
    for rank in ranks:
        rank.step(5, nonfinite=[NAN] if rank.rank == 1 else None)
    await eventually(running.coordinator.watched.incidents.all)
    await asyncio.gather(*(rank.end(6) for rank in ranks))
    await eventually(running.coordinator._is_over.is_set)
    url = f"http://127.0.0.1:{running.port}/api/v1/events"
    for _ in range(2):
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            reader = Reader(response)
            name, told = await reader.next()
            assert ("snapshot", "every rank has ended") == (name, told["ended"])
            assert ["nonfinite_input"] == [one["cause"] for one in told["incidents"]]
            assert ("end", "every rank has ended") == ((last := await reader.next())[0], last[1]["reason"])
            with pytest.raises(EOFError):
                await reader.next()


async def test_everyone_is_told_the_time_at_which_it_comes(run_coordinator: Any) -> None:
    running = await run_coordinator()
    await training(running)
    url = f"http://127.0.0.1:{running.port}/api/v1/events"
    async with aiohttp.ClientSession() as session, session.get(url) as first:
        _, told = await Reader(first).next()
        assert "ended" not in told
        # Nothing happens meanwhile but the time.
        await asyncio.sleep(1.0)
        async with session.get(url) as second:
            _, later = await Reader(second).next()
        assert later["now"] - told["now"] >= 900


async def test_the_newest_reader_pushes_out_the_oldest_of_the_address_that_has_most(
    run_coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "MAX_LISTENERS", 2)
    running = await run_coordinator()
    url = f"http://127.0.0.1:{running.port}/api/v1/events"
    async with aiohttp.ClientSession() as session, session.get(url) as first, session.get(url) as second:
        await Reader(first).next()
        async with session.get(url) as third:
            assert "snapshot" == (await Reader(third).next())[0]
            async with asyncio.timeout(10):
                assert await first.content.read() is not None  # to its end
        assert 1 == running.coordinator._pages.events.pushed_out
        assert not second.content.at_eof()


async def test_a_reader_that_takes_nothing_holds_up_nobody_and_costs_a_few_frames(
    run_coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "INTERVAL_S", 0.01)
    monkeypatch.setattr(event_stream, "BYTES_PER_S", 10**9)
    monkeypatch.setattr(event_stream, "SEND_DEADLINE_S", 1.0)
    running = await run_coordinator()
    note = running.coordinator._pages.page_state.timeline.note
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect(("127.0.0.1", running.port))
    stuck.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    listeners = running.coordinator._pages.events._listeners
    await eventually(lambda: len(listeners) == 1)
    (listener,) = listeners
    waiting = 0
    for number in range(2000):
        note("finding", f"{number} {'x' * 40_000}", 0)
        await asyncio.sleep(0.005)
        waiting = max(waiting, len(listener.waiting))
        if not listeners:
            break
    assert waiting <= event_stream.MAX_WAITING
    await eventually(lambda: not listeners, 20.0)
    stuck.close()


async def test_a_reader_that_fell_behind_is_shown_the_whole_again() -> None:
    listener = event_stream._Listener()
    listener.is_behind = False
    for number in range(event_stream.MAX_WAITING + 3):
        listener.give(bytes([number]))
    assert (True, []) == (listener.is_behind, listener.waiting)


async def test_a_picture_that_cannot_be_made_is_no_line_that_looks_alive(run_coordinator: Any) -> None:
    running = await run_coordinator()
    url = f"http://127.0.0.1:{running.port}/api/v1/events"
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as response:
            reader = Reader(response)
            await reader.next()
            running.coordinator._pages.events._paint = lambda: 1 / 0
            with pytest.raises(EOFError):
                await reader.next()
        async with session.get(url) as again:
            with pytest.raises((EOFError, aiohttp.ClientError)):
                await Reader(again).next()


async def test_a_page_that_fails_is_blindness_and_stops_nothing(run_coordinator: Any) -> None:
    running = await run_coordinator()
    running.coordinator._pages.page_state.timeline = None
    await eventually(running.coordinator.watched.blind)
    assert running.coordinator.watched.blind()[0].startswith("the page fails")


async def test_a_quiet_line_is_told_from_a_dead_one(run_coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "BEAT_S", 0.2)
    running = await run_coordinator()
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{running.port}/api/v1/events") as response,
    ):
        reader = Reader(response)
        assert ["snapshot", "beat"] == [(await reader.next())[0] for _ in range(2)]


async def test_one_rank_in_detail(run_coordinator: Any) -> None:
    running = await run_coordinator()
    await training(running)
    code, told = await running.get("/api/v1/ranks/1")
    assert (200, 1, 5, 0.2) == (code, told["rank"], told["step"], told["step_s"])
    for name in ("2", "x", "-1", "1e3", "٣", "1" * 5000):
        assert 404 == (await running.get(f"/api/v1/ranks/{name}"))[0]


async def test_the_pages_files_are_served_with_an_etag_and_nothing_else_is(run_coordinator: Any) -> None:
    running = await run_coordinator()
    url = f"http://127.0.0.1:{running.port}/web/"
    async with aiohttp.ClientSession() as session:
        async with session.get(url + "page.js") as answer:
            assert (200, "text/javascript", "nosniff") == (
                answer.status,
                answer.content_type,
                answer.headers["X-Content-Type-Options"],
            )
            etag = answer.headers["ETag"]
        async with session.get(url + "page.js", headers={"If-None-Match": etag}) as answer:
            assert 304 == answer.status
        for name in ("..%2Fpages.py", "%2e%2e/coordinator/pages.py", "nothing.js", ""):
            async with session.get(url + name) as answer:
                assert 404 == answer.status


async def test_the_page_forbids_what_is_not_its_own(run_coordinator: Any) -> None:
    running = await run_coordinator()
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{running.port}/") as answer:
        policy = answer.headers["Content-Security-Policy"]
        page = await answer.text()
    for rule in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"):
        assert rule in policy
    assert "unsafe" not in policy
    assert "http" not in page.replace("http-equiv", "")


async def test_the_page_itself_has_a_few_ranks_and_the_plain_one_all(run_coordinator: Any) -> None:
    running = await run_coordinator()
    for rank in range(MAX_PLAIN + 3):
        hello = wire.Hello(
            run_id="", rank=rank, world_size=500, host="h", rank_pid=1, sidecar_pid=1, metrics_address=""
        )
        running.coordinator.watched.intake.connect(hello, clock.wall_ns())
    _, page = await running.get("/")
    _, plain = await running.get("/plain")
    assert (1 + MAX_PLAIN, 1 + MAX_PLAIN + 3) == (page.count("<tr>"), plain.count("<tr>"))
    assert "<h2>Incidents</h2><p>none</p>" in plain
    assert "None" not in plain
    assert "<a href=plain>3 more ranks</a>" in page


async def post(running: Running, body: bytes, token: str = HALT_TOKEN, **headers: str) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{running.port}/api/v1/halt"
    headers = {"Authorization": f"Bearer {token}"} | headers
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
        return answer.status, await answer.json()


ASKED = json.dumps({"reason": "wrong data set", "by": "me"}).encode()


async def test_a_halt_is_asked_for_with_the_token_and_noted(run_coordinator: Any) -> None:
    asked: list[tuple[str, str]] = []
    running = await run_coordinator(ask_halt=lambda reason, by: asked.append((reason, by)))
    assert (202, {"accepted": True, "reason": "wrong data set"}) == await post(running, ASKED)
    assert [("wrong data set", "me from 127.0.0.1")] == asked
    assert (
        "asked for by me from 127.0.0.1: wrong data set"
        == running.coordinator._pages.page_state.timeline.all()[-1].text
    )


async def test_who_may_not_ask_changes_nothing(run_coordinator: Any) -> None:
    asked: list[tuple[str, str]] = []
    running = await run_coordinator(ask_halt=lambda reason, by: asked.append((reason, by)))
    port = running.port
    own, other = f"http://127.0.0.1:{port}", f"http://elsewhere:{port}"
    refused = [
        await post(running, ASKED, token=HALT_TOKEN[:-1]),
        await post(running, ASKED, token=TOKEN),
        await post(running, ASKED, token=""),
        await post(running, ASKED, Origin=other),
        await post(running, ASKED, Origin="null"),
        await post(running, b"x" * (MAX_BODY_BYTES + 1)),
        await post(running, b"{"),
        await post(running, b'{"reason": ""}'),
        await post(running, b'{"by": "me"}'),
        await post(running, b"\xff\xfe"),
    ]
    assert [401, 401, 401, 403, 403, 413, 422, 422, 422, 422] == [code for code, _ in refused]
    assert all(answer["error"] for _, answer in refused)
    assert [] == asked
    assert 202 == (await post(running, ASKED, Origin=own))[0]


async def test_why_a_halt_cannot_be_is_said(run_coordinator: Any) -> None:
    running = await run_coordinator(ask_halt=lambda *_: "a halt is under way")
    assert (409, {"error": "a halt is under way"}) == await post(running, ASKED)


@pytest.mark.parametrize("path", ["/", "/plain", "/api/v1/status", "/api/v1/events", "/web/page.js"])
async def test_everything_else_is_read_only(run_coordinator: Any, path: str) -> None:
    running = await run_coordinator()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{running.port}{path}") as answer,
    ):
        assert 405 == answer.status
