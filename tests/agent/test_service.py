"""An agent between sidecars and coordinator changes nothing but the number of messages; without it each sidecar speaks for itself."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.agent.conftest import StartAgent
from tests.coordinator.conftest import TOKEN, Running, SimulatedRank, bound, eventually

from holter.coordinator.recovery import journal
from holter.records import Nonfinite, Order, StepDone
from holter.transport import wire

StartCoordinator = Callable[..., Awaitable[Running]]
WORLD = 4


def train(ranks: list[SimulatedRank], steps: range, bad: int | None = None) -> None:
    for step in steps:
        for rank in ranks:
            is_bad = rank.rank == bad and step >= 5
            roots = {"gradients": 9000 + step, "parameters_after": (7 if is_bad else 5001) + step}
            rank.step(step, roots)


def steps_in(folder: Path) -> dict[int, list[int]]:
    """Rank -> its steps, in the order in which the journal has them."""
    found: dict[int, list[int]] = {}
    for entry in journal.read(folder):
        if isinstance(entry.observation.body, StepDone):
            found.setdefault(entry.observation.rank, []).append(entry.observation.step)
    return found


def members(running: Running) -> Any:
    return running.coordinator.watched.roster.members


async def incidents(running: Running, number: int = 1) -> list[Any]:
    await eventually(lambda: len(running.coordinator.watched.incidents.all()) >= number)
    return running.coordinator.watched.incidents.all()


async def diagnosed(running: Running, ranks: list[SimulatedRank]) -> tuple[Any, ...]:
    """What a run in which rank 2 parts from the others is found to have."""
    for rank in ranks:
        rank.attach()
    train(ranks, range(12), bad=2)
    (found,) = await incidents(running)
    first = found.causes[0]
    tables = sorted((fetch.tensor_class, fetch.step) for rank in ranks for fetch in rank.fetches)
    assert tables, "tables were asked for, and came"
    return first.cause, first.ranks, first.tensors, found.first_step


async def test_the_verdict_is_the_same_with_an_agent_and_without(
    run_coordinator: StartCoordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    straight = await run_coordinator(tmp_path / "straight")
    alone = await diagnosed(straight, [straight.rank(rank, world_size=WORLD) for rank in range(WORLD)])
    joined = await run_coordinator(tmp_path / "joined")
    agent = await start_agent(joined)
    ranks = [agent.rank(joined, rank, world_size=WORLD) for rank in range(WORLD)]
    assert alone == await diagnosed(joined, ranks)
    assert all(rank.uplink.is_by_agent for rank in ranks)
    assert {rank: list(range(12)) for rank in range(WORLD)} == await eventually(lambda: _whole(tmp_path / "joined"))


def _whole(run_dir: Path) -> dict[int, list[int]] | None:
    found = steps_in(run_dir / "journal")
    return found if sum(map(len, found.values())) == WORLD * 12 else None


async def test_orders_notices_and_goodbyes_pass_through(
    run_coordinator: StartCoordinator, start_agent: StartAgent
) -> None:
    running = await run_coordinator()
    agent = await start_agent(running)
    ranks = [agent.rank(running, rank) for rank in (0, 1)]
    for rank in ranks:
        rank.attach()
    await eventually(lambda: len(members(running)) == 2)
    order = Order(halt=7, kind="prepare", step=3)
    await running.coordinator._listener.order(order, [0, 1])
    await eventually(lambda: all(rank.orders == [order] for rank in ranks))
    assert await running.coordinator._listener.notify(1, wire.Notice(severity="info", text="hello"))
    await eventually(lambda: [one.text for one in ranks[1].notices] == ["hello"])
    assert [] == ranks[0].notices
    train(ranks, range(3))
    assert all(await asyncio.gather(*(rank.end(3) for rank in ranks))), "the coordinator let them go"
    assert "every rank has ended" == await asyncio.wait_for(running.task, 10.0)


async def test_what_is_urgent_goes_at_once(run_coordinator: StartCoordinator, start_agent: StartAgent) -> None:
    running = await run_coordinator()
    agent = await start_agent(running)
    ranks = [agent.rank(running, rank) for rank in (0, 1)]
    for rank in ranks:
        rank.attach()
    train(ranks, range(4))
    bad = Nonfinite(name="a.weight", where="gradient", nans=1, infs=0, numel=16)
    ranks[1].step(4, nonfinite=[bad])
    ranks[0].step(4)
    (found,) = await incidents(running)
    assert (1,) == found.causes[0].ranks


async def test_an_agent_that_is_killed_loses_nothing(
    run_coordinator: StartCoordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    running = await run_coordinator()
    agent = await start_agent(running)
    ranks = [agent.rank(running, rank) for rank in (0, 1)]
    for rank in ranks:
        rank.attach()
    train(ranks, range(5))
    await eventually(lambda: len(members(running)) == 2)
    # What the sidecars tell it from now on goes no further.
    agent.agent._carrier._settings.__dict__["report_interval_s"] = 60.0  # type: ignore[attr-defined]
    train(ranks, range(5, 10))
    await asyncio.sleep(0.7)
    await agent.kill()
    train(ranks, range(10, 15))
    await eventually(lambda: all(rank.uplink.is_connected and not rank.uplink.is_by_agent for rank in ranks), 20.0)
    await eventually(
        lambda: (
            {rank: set(range(15)) for rank in (0, 1)}
            == {rank: set(steps) for rank, steps in steps_in(tmp_path / "journal").items()}
        )
    )
    assert [] == running.coordinator.watched.incidents.all()
    assert all(member.line.is_live for member in members(running).values())


async def test_a_coordinator_that_starts_again_is_found_by_the_agent(
    run_coordinator: StartCoordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    listener = bound()
    first = await run_coordinator(listener=listener.dup())
    agent = await start_agent(first)
    ranks = [agent.rank(first, rank, key=f"key {rank}") for rank in (0, 1)]
    for rank in ranks:
        rank.attach()
    train(ranks, range(3))
    await eventually(lambda: len(members(first)) == 2)
    first.coordinator.stop()
    await first.task
    await eventually(lambda: not any(rank.uplink.is_connected for rank in ranks))
    train(ranks, range(3, 6))
    second = await run_coordinator(listener=listener)
    await eventually(lambda: len(members(second)) == 2, 20.0)
    await eventually(lambda: all(rank.uplink.is_connected for rank in ranks), 20.0)
    assert {0, 1} == set(members(second))
    await eventually(lambda: {*range(6)} <= set(steps_in(tmp_path / "journal").get(0, [])))


async def test_a_rank_that_is_turned_away_hears_why(run_coordinator: StartCoordinator, start_agent: StartAgent) -> None:
    running = await run_coordinator(world_size=2)
    agent = await start_agent(running)
    stranger = agent.rank(running, 7, world_size=8)
    await eventually(lambda: stranger.uplink.refusal)
    assert "world size is 2 here, 8 there" == stranger.uplink.refusal
    assert {} == members(running)


async def test_a_sidecar_that_says_nothing_is_silent_though_the_agent_speaks(
    run_coordinator: StartCoordinator, start_agent: StartAgent
) -> None:
    running = await run_coordinator()
    agent = await start_agent(running)
    ranks = [agent.rank(running, rank) for rank in (0, 1)]
    for rank in ranks:
        rank.attach()
    await eventually(lambda: len(members(running)) == 2)
    # As by SIGSTOP: the line stands, and nothing comes.
    hello = msgspec.structs.replace(agent.agent.speech.members[1].hello, sidecar_pid=99)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(agent.path))) as session:
        url, headers = "http://localhost/ingest", {"Authorization": f"Bearer {TOKEN}"}
        ranks[1].vanish()
        async with session.ws_connect(url, headers=headers) as stopped:
            await stopped.send_bytes(wire.encode(hello))
            await eventually(lambda: members(running)[1].state == "silent", 20.0)
            assert "connected" == members(running)[0].state


async def test_another_user_is_kept_out(run_coordinator: StartCoordinator, start_agent: StartAgent) -> None:
    running = await run_coordinator()
    agent = await start_agent(running)
    assert 0o700 == agent.path.parent.stat().st_mode & 0o777
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    # Whoever opens the directory to all has not yet let all in.
    for folder in (agent.path.parent, agent.path):
        folder.chmod(0o777)
    for folder in agent.path.parent.parents:
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o755)
    ask = f"""
import os, socket
os.setgid(65534); os.setuid(65534)
line = socket.socket(socket.AF_UNIX)
line.connect({str(agent.path)!r})
line.sendall(b"GET /ingest HTTP/1.1\\r\\nHost: localhost\\r\\nAuthorization: Bearer {TOKEN}\\r\\n\\r\\n")
print(line.recv(100).split(b"\\r")[0].decode())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", ask, stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(process.communicate(), 20.0)
    assert "HTTP/1.1 403 Forbidden" == said.decode().strip()
