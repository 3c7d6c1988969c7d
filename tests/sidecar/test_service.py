"""The sidecar's loop beside a rank that is a plain process."""

import asyncio
import socket
import subprocess
from collections.abc import Callable

import msgspec
import pytest
from aiohttp import ClientSession

from holter.page import PageWriter
from holter.records import Farewell, Observation, Phase, StepDone
from holter.sidecar.process import started_ticks
from holter.sidecar.service import Sidecar, SidecarSettings


def done(step: int) -> bytes:
    body = StepDone(
        seconds=0.1,
        phase_seconds={},
        micro_steps=1,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=0.1,
        batch=0,
        roots={},
        nonfinite=[],
        overhead_ratio=0.0,
        check_interval=1,
    )
    return msgspec.msgpack.encode(Observation(rank=0, step=step, at_ns=1, body=body))


async def until(is_there: Callable[[], object]) -> None:
    for _ in range(1000):
        if is_there():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited ten seconds")


@pytest.fixture
def rank():
    process = subprocess.Popen(["sleep", "60"])
    page = PageWriter.create(
        rank=0, world_size=1, pid=process.pid, started_ticks=started_ticks(process.pid), ring_bytes=4 << 20
    )
    yield process, page
    process.kill()
    process.wait()
    page.close()


async def test_metrics_and_health_are_served_and_it_ends_with_the_rank(rank):
    process, page = rank
    page.write(done(0))
    page.beat(step=1, phase=Phase.FORWARD, micro_step=0, at_ns=1)
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._metrics_address and sidecar._state.step)
    async with ClientSession() as session:
        async with session.get(f"http://{sidecar._metrics_address}/healthz") as answer:
            assert {"ok": True, "rank": 0, "coordinator": False} == await answer.json()
        async with session.get(f"http://{sidecar._metrics_address}/metrics") as answer:
            assert "holter_step" in await answer.text()
    process.kill()
    process.wait()
    await asyncio.wait_for(running, 10)


async def test_garbage_on_the_page_is_counted_and_reading_goes_on(rank):
    process, page = rank
    page.write(b"\xff garbage")
    page.write(done(0))
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    process.kill()
    process.wait()
    await asyncio.wait_for(sidecar.run(), 10)
    assert (1, 1) == (sidecar.dropped, sidecar._state.step)


async def test_the_last_words_of_a_rank_that_said_much_are_heard(rank):
    process, page = rank
    for step in range(3000):
        assert page.write(done(step))
    last = Farewell(kind="exception", text="ValueError: boom", where="")
    page.write(msgspec.msgpack.encode(Observation(rank=0, step=3000, at_ns=1, body=last)))
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    process.kill()
    process.wait()
    await asyncio.wait_for(sidecar.run(), 10)
    assert last == sidecar._farewell


async def test_a_taken_port_for_metrics_is_replaced(rank):
    process, page = rank
    taken = socket.create_server(("127.0.0.1", 0))
    sidecar = Sidecar(SidecarSettings(page=page.fd, metrics_port=taken.getsockname()[1]), lambda _: None)
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._metrics_address)
    assert str(taken.getsockname()[1]) != sidecar._metrics_address.rpartition(":")[2]
    process.kill()
    process.wait()
    await asyncio.wait_for(running, 10)
    taken.close()
