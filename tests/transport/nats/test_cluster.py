"""Three servers, one of them killed, whichever it is: nothing is lost, nobody is accused, everything heals."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.coordinator.conftest import eventually
from tests.transport.nats.conftest import Place

from holter.coordinator.recovery import journal
from holter.records import StepDone
from nats_servers import Server, cluster_of, program

PATIENCE_S = 90.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[Server]]:
    if program() is None:
        pytest.skip("nats-server is not installed")
    servers = cluster_of(tmp_path, ["127.0.0.1"] * 3)
    yield servers
    for server in servers:
        server.kill()
    shutil.rmtree(tmp_path, ignore_errors=True)


def heard(place: Place) -> set[tuple[int, int]]:
    """(rank, step) of every step that is in the journal."""
    entries = journal.read(place.run_dir / "journal")
    return {
        (one.observation.rank, one.observation.step) for one in entries if isinstance(one.observation.body, StepDone)
    }


async def lose_one_after_the_other(place: Place, servers: list[Server]) -> None:
    place.coordinator()
    ranks = [place.rank(rank) for rank in range(2)]
    for rank in ranks:
        rank.attach()
        rank.step(0)
    await eventually(lambda: all(rank.uplink.is_connected for rank in ranks), PATIENCE_S)
    step = 1
    for number, server in enumerate(servers):
        server.kill()
        for _ in range(20):
            for rank in ranks:
                rank.step(step)
            step += 1
            await asyncio.sleep(0.05)
        await eventually(
            lambda until=step: heard(place) >= {(rank, at) for rank in range(2) for at in range(until)}, PATIENCE_S
        )
        await eventually(lambda: all(rank.uplink.is_connected for rank in ranks), PATIENCE_S)
        assert [] == place.incidents(), f"after server {number}"
        server.start()
        server.wait()
        await asyncio.sleep(3.0)
    for rank in ranks:
        assert await rank.end(step)
    assert {(rank, at) for rank in range(2) for at in range(step)} == heard(place)
    assert [] == [found for found in place.incidents() if found["severity"] == "critical"]


@pytest.mark.slow
async def test_a_server_that_dies_takes_nothing_with_it(cluster: list[Server], place_at: Callable[..., Place]) -> None:
    place = place_at(",".join(server.address for server in cluster))
    await lose_one_after_the_other(place, cluster[:1])


@pytest.mark.release
@pytest.mark.timeout(900)
async def test_each_of_three_may_die(cluster: list[Server], place_at: Callable[..., Place]) -> None:
    place = place_at(",".join(server.address for server in cluster))
    await lose_one_after_the_other(place, cluster)
