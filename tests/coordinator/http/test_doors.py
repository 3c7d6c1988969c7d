"""Strangers keep nobody out, a name that is not ours reads nothing, and who has no token sees nothing where one is asked for."""

import asyncio
import contextlib
import gzip
import socket
from typing import Any

import aiohttp
import pytest
from tests.coordinator.conftest import HALT_TOKEN, TOKEN, Running, eventually

from holter.coordinator.http import doors
from holter.coordinator.http.doors import READ_COOKIE, DoorSettings, raise_descriptor_limit
from holter.transport.websocket.listener import MAX_NAMELESS

EYES = "eyes"


async def status_of(running: Running, path: str, host: str | None = None, token: str = "", **more: Any) -> int:
    headers = ({"Host": host} if host else {}) | ({"Authorization": f"Bearer {token}"} if token else {})
    url = f"http://127.0.0.1:{running.port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers, **more) as answer:
        return answer.status


async def test_idle_strangers_keep_nobody_out(run_coordinator: Any) -> None:
    """Half of them say nothing, half begin a request and never end it."""
    running = await run_coordinator()
    strangers = []
    for number in range(3 * doors.MAX_OF_ADDRESS):
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        if number % 2:
            writer.write(b"GET /api/v1/status HTTP/1.1\r\nHost: 127")
        strangers.append(writer)
    rank = running.rank(0)
    rank.attach()
    await eventually(lambda: running.coordinator.watched.roster.num_connected == 1)
    assert 200 == await status_of(running, "/healthz")
    assert running.coordinator.doors.pushed_out >= doors.MAX_OF_ADDRESS
    assert len(running.coordinator.doors._strangers) <= doors.MAX_OF_ADDRESS + 1
    for writer in strangers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert running.coordinator.watched.roster.num_connected == 1


async def test_who_shows_the_token_and_no_name_keeps_nobody_out(run_coordinator: Any) -> None:
    """Half of them ask for a page with the token to report, half hold nearly a whole frame and never say who they are."""
    running = await run_coordinator()
    token, upgrade = f"Authorization: Bearer {TOKEN}\r\n", "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    heads = (
        f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{token}\r\n",
        f"GET /ingest HTTP/1.1\r\nHost: localhost\r\n{token}{upgrade}{key}\r\n",
    )
    held = []
    for number in range(6 * MAX_NAMELESS):
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(heads[number % 2].encode() + b"\x82\xfe\xff\xff" * (number % 2))
        held.append(writer)
    rank = running.rank(0)
    rank.attach()
    await eventually(lambda: running.coordinator.watched.roster.num_connected == 1)
    assert 200 == await status_of(running, "/healthz")
    assert len(running.coordinator._listener._nameless) <= MAX_NAMELESS
    assert len(running.coordinator.doors._strangers) <= doors.MAX_OF_ADDRESS + 1
    for writer in held:
        writer.transport.abort()


async def test_a_flood_of_connections_does_not_hold_the_loop(run_coordinator: Any) -> None:
    """They are there before the loop looks: whatever else is ready has its turn between two of them."""
    running = await run_coordinator()
    flood = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(60)]
    turns = 0
    while len(running.coordinator.doors._strangers) < len(flood) and turns < 10_000:
        await asyncio.sleep(0)
        turns += 1
    for one in flood:
        one.close()
    assert turns >= len(flood) // 2


@pytest.mark.parametrize(
    ("host", "code"),
    [
        (None, 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("10.1.2.3:9", 200),
        ("localhost:80", 200),
        (socket.gethostname(), 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:80", 421),
        ("localhost.evil.example", 421),
    ],
)
async def test_a_name_that_is_not_ours_is_refused(run_coordinator: Any, host: str | None, code: int) -> None:
    running = await run_coordinator()
    assert code == await status_of(running, "/api/v1/status", host)
    assert (code == 421) == (running.coordinator.doors.foreign_hosts == 1)


async def test_a_name_that_was_declared_is_ours(run_coordinator: Any) -> None:
    running = await run_coordinator(doors=DoorSettings(TOKEN, hosts=["watch.example"]))
    assert 200 == await status_of(running, "/", "watch.example:443")


@pytest.mark.parametrize(
    "path", ["/", "/plain", "/metrics", "/sd", "/api/v1/status", "/api/v1/incidents", "/web/page.css"]
)
async def test_with_a_read_token_nobody_reads_without_it(run_coordinator: Any, path: str) -> None:
    running = await run_coordinator(doors=DoorSettings(TOKEN, read_token=EYES))
    assert 401 == await status_of(running, path)
    assert 401 == await status_of(running, path, token=HALT_TOKEN)
    assert 401 == await status_of(running, f"{path}?token=eye")
    assert 200 == await status_of(running, path, token=EYES)
    assert 200 == await status_of(running, "/healthz")


async def test_a_browser_shows_the_token_once(run_coordinator: Any) -> None:
    running = await run_coordinator(doors=DoorSettings(TOKEN, read_token=EYES))
    url = f"http://127.0.0.1:{running.port}/?token=eyes"
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(cookie_jar=jar) as session, session.get(url) as answer:
        assert 200 == answer.status
        assert "token" not in str(answer.url)
        assert [READ_COOKIE] == [cookie.key for cookie in jar]


def test_too_few_descriptors_are_said() -> None:
    assert raise_descriptor_limit(0) is None
    assert "raise `ulimit -n`" in str(raise_descriptor_limit(10**9))


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/status", "/api/v1/events"])
async def test_the_token_to_report_does_not_read_where_a_read_token_is_set(run_coordinator: Any, path: str) -> None:
    running = await run_coordinator(doors=DoorSettings(TOKEN, read_token=EYES))
    assert 401 == await status_of(running, path, token=TOKEN)


async def test_what_a_stranger_sends_compressed_is_not_unpacked(run_coordinator: Any) -> None:
    """A good request to halt is none when it is compressed: nobody looks into it, however large it would become."""
    running = await run_coordinator()
    url, body = f"http://127.0.0.1:{running.port}/api/v1/halt", gzip.compress(b'{"reason": "no"}')
    headers = {"Authorization": f"Bearer {HALT_TOKEN}", "Content-Encoding": "gzip"}
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
        assert 422 == answer.status
