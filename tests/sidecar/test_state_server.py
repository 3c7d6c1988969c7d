"""A sidecar's own port: strangers take no descriptors that the watcher needs."""

import asyncio
from typing import Any

import aiohttp

from holter.sidecar.state import MAX_CONNECTIONS, MetricsServer, MetricsSettings

EYES = "eyes"


async def status_of(url: str, **headers: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status


async def serve(**settings: Any) -> tuple[MetricsServer, str]:
    server = MetricsServer(MetricsSettings(**settings), lambda _: (b"up 1\n", "text/plain"), lambda: {"ok": True})
    return server, f"http://{await server.start()}"


async def test_idle_strangers_push_each_other_out() -> None:
    server, url = await serve()
    host, port = url.removeprefix("http://").split(":")
    strangers = [await asyncio.open_connection(host, int(port)) for _ in range(3 * MAX_CONNECTIONS)]
    assert 200 == await status_of(f"{url}/metrics")
    assert len(server._requests.connections) <= MAX_CONNECTIONS + 1
    for _, writer in strangers:
        writer.close()
    await server.stop()


async def test_it_answers_what_it_has_to_who_may_read() -> None:
    server, url = await serve(read_token=EYES)
    assert 200 == await status_of(f"{url}/healthz")
    assert 401 == await status_of(f"{url}/metrics")
    assert 200 == await status_of(f"{url}/metrics", Authorization=f"Bearer {EYES}")
    assert 421 == await status_of(f"{url}/metrics", Authorization=f"Bearer {EYES}", Host="evil.example")
    assert 404 == await status_of(f"{url}/elsewhere")
    await server.stop()
