"""The sidecar's loop beside a rank that is a plain process."""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest
from aiohttp import ClientSession

from holter.page import PageWriter
from holter.records import Exam, Exited, Farewell, Observation, OnDevice, Overdue, Phase, StepDone
from holter.sidecar.process import started_ticks
from holter.sidecar.service import Sidecar, SidecarSettings
from holter.sidecar.state import MetricsSettings
from holter.transport import wire


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


def worn(command: list[str]):
    """A process and its page."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    page = PageWriter.create(
        rank=0, world_size=1, pid=process.pid, started_ticks=started_ticks(process.pid), ring_bytes=4 << 20
    )
    yield process, page
    process.kill()
    process.communicate()
    page.close()


EYES = "a token to read with"


@pytest.fixture
def rank():
    yield from worn(["sleep", "60"])


@pytest.fixture
def python_rank():
    yield from worn([sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(60)"])


async def test_metrics_and_health_are_served_and_it_ends_with_the_rank(rank):
    process, page = rank
    page.write(done(0))
    page.beat(step=1, phase=Phase.FORWARD, micro_step=0, at_ns=1)
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._link.metrics_address and sidecar._state.step)
    async with ClientSession() as session:
        async with session.get(f"http://{sidecar._link.metrics_address}/healthz") as answer:
            assert {"ok": True, "rank": 0, "coordinator": False} == await answer.json()
        async with session.get(f"http://{sidecar._link.metrics_address}/metrics") as answer:
            assert "holter_step" not in await answer.text(), "a run without a name yet has no series"
        sidecar._link.run_id = "r"
        async with session.get(f"http://{sidecar._link.metrics_address}/metrics") as answer:
            lines = (await answer.text()).splitlines()
            assert 'holter_step{rank="0",run_id="r"} 1.0' in lines
            assert 'holter_coordinator_up{rank="0",run_id="r"} 0.0' in lines
    process.kill()
    process.wait()
    await asyncio.wait_for(running, 10)


async def test_metrics_are_read_with_the_token_and_under_this_hosts_name_only(rank):
    process, page = rank
    settings = SidecarSettings(page=page.fd, metrics=MetricsSettings(read_token=EYES))
    sidecar = Sidecar(settings, lambda _: None)
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._link.metrics_address)
    url = f"http://{sidecar._link.metrics_address}/metrics"
    shown = {"Authorization": f"Bearer {EYES}"}
    codes = []
    async with ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer ears"}, shown, shown | {"Host": "evil.example"}):
            async with session.get(url, headers=headers) as answer:
                codes.append(answer.status)
    assert [401, 401, 200, 421] == codes
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
    sidecar = Sidecar(
        SidecarSettings(page=page.fd, metrics=MetricsSettings(port=taken.getsockname()[1])), lambda _: None
    )
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._link.metrics_address)
    assert str(taken.getsockname()[1]) != sidecar._link.metrics_address.rpartition(":")[2]
    process.kill()
    process.wait()
    await asyncio.wait_for(running, 10)
    taken.close()


def said(sidecar: Sidecar, kind: type) -> list[Observation]:
    """What it would tell a coordinator, of one kind."""
    return [observation for observation, _ in sidecar._link._unsent if isinstance(observation.body, kind)]


async def test_what_a_rank_left_is_told_before_how_it_ended_always(rank):
    process, page = rank
    page.write(done(0))
    page.beat(step=1, phase=Phase.BACKWARD, micro_step=3, at_ns=1)
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._state.step)
    process.kill()
    process.wait()
    await asyncio.wait_for(running, 10)
    left, ended = (observation for observation, _ in sidecar._link._unsent[-2:])
    assert isinstance(left.body, Exam)
    assert isinstance(ended.body, Exited)
    assert ("death", Phase.BACKWARD, 1, 1.0) == (
        left.body.reason,
        left.body.phase,
        left.step,
        left.body.statistics["loss"],
    )


@pytest.mark.slow
async def test_a_stopped_rank_is_told_of_at_once_and_that_it_moves_too(rank):
    process, page = rank
    page.beat(step=1, phase=Phase.FORWARD, micro_step=0, at_ns=1)
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._state.snapshot(0).phase is not None)
    process.send_signal(signal.SIGSTOP)
    await until(lambda: len(said(sidecar, Overdue)) == 2)
    process.send_signal(signal.SIGCONT)
    await until(lambda: len(said(sidecar, Overdue)) == 3)
    assert ["suspect", "overdue", "moved"] == [observation.body.tier for observation in said(sidecar, Overdue)]
    assert all(is_urgent for observation, is_urgent in sidecar._link._unsent if isinstance(observation.body, Overdue))
    process.kill()
    process.wait()
    await asyncio.wait_for(running, 10)


@pytest.mark.slow
async def test_a_coordinator_that_is_new_on_the_line_hears_of_a_standstill_again(rank):
    process, page = rank
    page.beat(step=1, phase=Phase.FORWARD, micro_step=0, at_ns=1)
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._state.snapshot(0).phase is not None)
    welcome = wire.Welcome(run_id="r", run_dir="/r")
    sidecar._answer(welcome)
    assert [] == said(sidecar, Overdue)
    process.send_signal(signal.SIGSTOP)
    await until(lambda: len(said(sidecar, Overdue)) == 2)
    sidecar._answer(welcome)
    process.send_signal(signal.SIGCONT)
    await until(lambda: len(said(sidecar, Overdue)) == 4)
    sidecar._answer(welcome)
    told = [observation.body for observation in said(sidecar, Overdue)]
    assert ["suspect", "overdue", "overdue", "moved", "moved"] == [overdue.tier for overdue in told]
    assert told[2].waited_s >= told[1].waited_s
    process.kill()
    process.wait()
    await asyncio.wait_for(running, 10)


async def test_every_request_to_examine_is_answered_also_after_the_end(rank):
    process, page = rank
    page.beat(step=1, phase=Phase.FORWARD, micro_step=0, at_ns=1)
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._state.snapshot(0).phase is not None)
    assert sidecar._answer(wire.Examine(asked_ns=1, depth="native")) is None
    assert sidecar._answer(wire.Examine(asked_ns=2, depth="quick")) is None
    await until(lambda: len(said(sidecar, Exam)) == 2)
    assert {1, 2} == {observation.body.asked_ns for observation in said(sidecar, Exam)}
    assert all("no recorder" in observation.body.flight_error for observation in said(sidecar, Exam))
    process.kill()
    process.wait()
    await asyncio.wait_for(running, 10)
    report = sidecar._answer(wire.Examine(asked_ns=3, depth="quick"))
    assert isinstance(report, wire.Report)
    assert (3, "death") == (report.observations[0].body.asked_ns, report.observations[0].body.reason)


async def test_a_request_under_way_when_the_rank_dies_is_answered_before_its_end_is_told(rank):
    process, page = rank
    page.beat(step=1, phase=Phase.FORWARD, micro_step=0, at_ns=1)
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._state.snapshot(0).phase is not None)
    sidecar._answer(wire.Examine(asked_ns=1, depth="native"))
    process.kill()
    process.wait()
    await asyncio.wait_for(running, 20)
    assert [("asked", 1), ("death", 0)] == [(o.body.reason, o.body.asked_ns) for o in said(sidecar, Exam)]
    assert isinstance(sidecar._link._unsent[-1][0].body, Exited)


async def test_a_crash_is_examined_and_then_acknowledged(python_rank, monkeypatch):
    monkeypatch.setattr("holter.sidecar.examination.CRASH_S", 20.0)
    process, page = python_rank
    await asyncio.to_thread(process.stdout.readline)
    ours, theirs = socket.socketpair()
    page.beat(step=1, phase=Phase.FORWARD, micro_step=0, at_ns=1)
    sidecar = Sidecar(SidecarSettings(page=page.fd, crash_fd=os.dup(ours.fileno())), lambda _: None)
    running = asyncio.create_task(sidecar.run())
    await until(lambda: sidecar._state.snapshot(0).phase is not None)
    theirs.send(struct.pack("=ii", signal.SIGABRT, process.pid))
    theirs.setblocking(False)
    assert b"!" == await asyncio.wait_for(asyncio.get_running_loop().sock_recv(theirs, 1), 60)
    seen = said(sidecar, Exam)[0].body
    assert "last_breath" == seen.reason
    assert "<module>" == seen.stacks[0].frames[-1].function, seen.stack_error
    process.kill()
    process.wait()
    await asyncio.wait_for(running, 10)
    # What was seen then is in the last exam too.
    left = said(sidecar, Exam)[-1].body
    assert ("death", seen.stacks) == (left.reason, left.stacks)
    ours.close()
    theirs.close()


async def test_last_words_give_the_interpreter_time_to_end(rank):
    process, page = rank
    for step in range(10):
        page.write(done(step))
    last = Farewell(kind="end", text="", where="")
    page.write(msgspec.msgpack.encode(Observation(rank=0, step=10, at_ns=1, body=last)))
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    process.kill()
    process.wait()
    await asyncio.wait_for(sidecar.run(), 10)
    assert 120.0 == sidecar._watcher._deadlines.allowed(Phase.OTHER, 0.0).deadline_s


async def test_the_device_that_the_rank_names_is_the_one_that_is_read(rank):
    process, page = rank
    named = Observation(rank=0, step=0, at_ns=1, body=OnDevice(uuid="GPU-1"))
    page.write(msgspec.msgpack.encode(named))
    sidecar = Sidecar(SidecarSettings(page=page.fd), lambda _: None)
    process.kill()
    process.wait()
    await asyncio.wait_for(sidecar.run(), 10)
    assert "GPU-1" == sidecar._watcher._devices._wanted.uuid
