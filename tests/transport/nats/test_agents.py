"""A host's agent over a real server: the verdict is the one without it, and neither its death nor the coordinator's loses anything."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.agent.conftest import RunningAgent
from tests.agent.test_service import steps_in, train
from tests.coordinator.conftest import TOKEN, SimulatedRank, eventually
from tests.transport.nats.conftest import Place

from holter.agent.service import HostAgent, HostAgentSettings
from holter.records import Nonfinite
from holter.transport.nats.line import NatsPlace, line_to
from holter.transport.nats.subjects import Subjects

pytestmark = pytest.mark.slow
NAN = [Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)]
PATIENCE_S = 60.0
WORLD = 4


@pytest.fixture
async def agent(place: Place, tmp_path: Path) -> AsyncIterator[RunningAgent]:
    """Of the host of all ranks."""
    path = tmp_path / "agents" / "one.sock"
    made = HostAgent(HostAgentSettings(path, place.address, TOKEN, place.run_id))
    running = RunningAgent(made, path, asyncio.create_task(made.run()))
    yield running
    made.stop()
    await asyncio.wait({running.task}, timeout=10.0)


async def attached(place: Place, agent: RunningAgent, world: int) -> list[SimulatedRank]:
    """Ranks that a coordinator hears by the agent."""
    await eventually(agent.path.is_socket, PATIENCE_S)
    ranks = [place.rank(rank, agent=str(agent.path), world_size=world) for rank in range(world)]
    for rank in ranks:
        rank.attach()
    await eventually(lambda: all(rank.uplink.is_connected for rank in ranks), PATIENCE_S)
    return ranks


def told(place: Place) -> list[tuple[str, list[int], list[str], int]]:
    """Cause, ranks, tensors and first step of each incident."""
    tops = [(one["causes"][0], one["first_step"]) for one in place.incidents()]
    return [(top["cause"], top["ranks"], top["tensors"], step) for top, step in tops]


async def speakers(place: Place) -> set[str]:
    """Who has said something that the stream keeps."""
    subjects = Subjects(place.run_id)
    async with line_to(NatsPlace(place.address), "coordinator") as line:
        state = (await line.js.stream_info(subjects.stream, subjects_filter=subjects.said("*"))).state
        return {subject.rpartition(".")[2] for subject in state.subjects}


async def test_tables_are_fetched_and_the_verdict_is_the_one_without_it(
    place: Place, agent: RunningAgent, place_at: Callable[..., Place]
) -> None:
    place.coordinator(world_size=WORLD)
    ranks = await attached(place, agent, WORLD)
    train(ranks, range(12), bad=2)
    await eventually(place.incidents, PATIENCE_S)
    assert any(rank.fetches for rank in ranks), "tables were asked for, and came"
    (only,) = await speakers(place)
    assert only.startswith("host-")
    alone = place_at(place.address, run_id="alone")
    alone.coordinator(world_size=WORLD)
    straight = [alone.rank(rank, world_size=WORLD) for rank in range(WORLD)]
    for rank in straight:
        rank.attach()
    train(straight, range(12), bad=2)
    await eventually(alone.incidents, PATIENCE_S)
    # The first word is mended once all tables are there.
    await eventually(lambda: told(place) == told(alone), PATIENCE_S)
    ((_, ranks_named, _, first_step),) = told(place)
    assert ([2], 5) == (ranks_named, first_step)
    assert {str(rank) for rank in range(WORLD)} == await speakers(alone)


async def test_everybody_is_let_go_and_the_coordinator_ends(place: Place, agent: RunningAgent) -> None:
    process = place.coordinator()
    ranks = await attached(place, agent, 2)
    train(ranks, range(3))
    assert all(await asyncio.gather(*(rank.end(3) for rank in ranks))), "the coordinator let them go"
    assert 0 == await asyncio.to_thread(process.process.wait, 30)
    assert {rank: [0, 1, 2] for rank in (0, 1)} == steps_in(place.run_dir / "journal")


async def test_what_a_host_says_while_nobody_leads_is_judged_by_the_successor_once(
    place: Place, agent: RunningAgent
) -> None:
    first = place.coordinator()
    ranks = await attached(place, agent, 2)
    train(ranks, range(3))
    second = await place.standby()
    first.send(signal.SIGKILL)
    for step in range(3, 6):
        for rank in ranks:
            rank.step(step, nonfinite=NAN if (rank.rank, step) == (1, 5) else None)
    await eventually(lambda: place.leader() == second.pid, PATIENCE_S)
    (found,) = await eventually(place.incidents, PATIENCE_S)
    assert ([1], 5) == (found["causes"][0]["ranks"], found["first_step"])
    await asyncio.sleep(1.5)
    assert [found["id"]] == [one["id"] for one in place.incidents()]
    await eventually(lambda: {0: {*range(6)}, 1: {*range(6)}} == heard(place), PATIENCE_S)


def heard(place: Place) -> dict[int, set[int]]:
    return {rank: set(steps) for rank, steps in steps_in(place.run_dir / "journal").items()}


async def test_an_agent_that_is_killed_loses_nothing(place: Place, agent: RunningAgent) -> None:
    place.coordinator()
    ranks = await attached(place, agent, 2)
    train(ranks, range(5))
    await asyncio.sleep(1.0)
    await agent.kill()
    train(ranks, range(5, 10))
    await eventually(lambda: all(rank.uplink.is_connected and not rank.uplink.is_by_agent for rank in ranks), 30.0)
    await eventually(lambda: {rank: {*range(10)} for rank in (0, 1)} == heard(place), PATIENCE_S)
    assert [] == place.incidents()
