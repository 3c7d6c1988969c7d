"""Two coordinators of one run on a real server: who dies is followed, who wakes up orders nothing, no incident is lost or doubled."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest
from tests.agent.test_service import steps_in
from tests.coordinator.conftest import SimulatedRank, eventually
from tests.transport.nats.conftest import Place, Process

from holter import clock
from holter.coordinator.recovery import journal
from holter.records import Consumed, Nonfinite, Order
from holter.transport import wire
from holter.transport.nats import frames
from holter.transport.nats.line import NatsPlace, line_to
from holter.transport.nats.subjects import Subjects

pytestmark = pytest.mark.slow
NAN = [Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)]
PATIENCE_S = 60.0


async def trained(place: Place, steps: int = 3) -> list[SimulatedRank]:
    """Two ranks that a coordinator hears."""
    ranks = [place.rank(rank) for rank in range(2)]
    for rank in ranks:
        rank.attach()
        for step in range(steps):
            rank.step(step)
    await eventually(lambda: all(rank.uplink.is_connected for rank in ranks), PATIENCE_S)
    return ranks


async def with_an_incident(place: Place) -> tuple[Process, list[SimulatedRank], dict[str, Any]]:
    """A coordinator, its ranks, and the one incident that it named."""
    first = place.coordinator()
    ranks = await trained(place)
    ranks[1].step(3, nonfinite=NAN)
    ranks[0].step(3)
    (found,) = await eventually(place.incidents, PATIENCE_S)
    return first, ranks, found


def tokens(ranks: list[SimulatedRank]) -> set[int]:
    """The newest that each has heard."""
    return {rank.uplink._carrier.coordinator_token for rank in ranks}


async def test_what_is_said_while_nobody_leads_is_judged_by_the_successor_once(place: Place) -> None:
    first = place.coordinator()
    ranks = await trained(place)
    found = [entry.observation.body for entry in journal.read(place.run_dir / "journal")]
    assert any(isinstance(body, Consumed) for body in found), (
        "from where on to read is written before anybody is welcomed"
    )
    second = await place.standby()
    first.send(signal.SIGKILL)
    for step in range(3, 6):
        for rank in ranks:
            rank.step(step, nonfinite=NAN if (rank.rank, step) == (1, 5) else None)
    # The server has it although nobody leads.
    await eventually(lambda: not any(rank.uplink._speech.outbox for rank in ranks), 5.0)
    await eventually(lambda: place.leader() == second.pid, PATIENCE_S)
    (found,) = await eventually(place.incidents, PATIENCE_S)
    assert [1] == found["causes"][0]["ranks"]
    assert 5 == found["first_step"]
    await asyncio.sleep(1.5)
    assert [found["id"]] == [one["id"] for one in place.incidents()]
    (token,) = tokens(ranks)
    assert token > 1, "the first one's is 1, and a token only grows"


async def test_an_incident_that_was_open_keeps_its_name_through_a_takeover(place: Place) -> None:
    first, ranks, found = await with_an_incident(place)
    second = await place.standby()
    first.send(signal.SIGKILL)
    await eventually(lambda: place.leader() == second.pid, PATIENCE_S)
    for rank in ranks:
        rank.step(4)
    await asyncio.sleep(3.0)
    assert [found["id"]] == [one["id"] for one in place.incidents()]
    assert 1 == sum(notice.severity == "critical" for rank in ranks for notice in rank.notices), "nobody is told twice"


async def test_who_was_stopped_and_wakes_up_stands_by_again_and_writes_nothing(place: Place) -> None:
    first = place.coordinator()
    ranks = await trained(place)
    second = await place.standby()
    first.send(signal.SIGSTOP)
    await eventually(lambda: place.leader() == second.pid, PATIENCE_S)
    ranks[1].step(3, nonfinite=NAN)
    ranks[0].step(3)
    (found,) = await eventually(place.incidents, PATIENCE_S)
    first.send(signal.SIGCONT)
    await eventually(lambda: "stands by again" in (place.run_dir / "logs" / "coordinator.log").read_text(), PATIENCE_S)
    await asyncio.sleep(2.0)
    assert place.leader() == second.pid
    assert [found["id"]] == [one["id"] for one in place.incidents()]
    (token,) = tokens(ranks)
    second.send(signal.SIGKILL)
    await eventually(lambda: place.leader() == first.pid, PATIENCE_S)
    await eventually(lambda: len(tokens(ranks)) == 1 and min(tokens(ranks)) > token, PATIENCE_S)


async def test_an_older_coordinators_order_is_refused_by_every_sidecar(place: Place) -> None:
    place.coordinator()
    ranks = await trained(place)
    token = ranks[0].uplink._carrier.coordinator_token
    order = Order(halt=1, kind="prepare", step=9)
    async with line_to(NatsPlace(place.address), "coordinator") as line:
        for told_by in (token - 1, token):
            frame = frames.encode(frames.Told(told_by, wire.Halt(order=order)))
            await line.client.publish(Subjects(place.run_id).told("0"), frame)
            await line.client.flush()
            await asyncio.sleep(0.3)
            if told_by < token:
                assert [] == ranks[0].orders
    await eventually(lambda: [order] == ranks[0].orders)
    assert 1 == ranks[0].uplink._carrier.num_stale


async def test_who_is_asked_to_stop_gives_the_lease_up_and_is_followed_at_once(place: Place) -> None:
    first, ranks, found = await with_an_incident(place)
    second = await place.standby()
    began_s = clock.monotonic_s()
    first.send(signal.SIGTERM)
    await eventually(lambda: place.leader() == second.pid, PATIENCE_S)
    assert clock.monotonic_s() - began_s < 10.0
    assert 0 == await asyncio.to_thread(first.process.wait, 10)
    await asyncio.sleep(1.5)
    assert [found["id"]] == [one["id"] for one in place.incidents()]
    for rank in ranks:
        assert await rank.end(4)
    assert 0 == await asyncio.to_thread(second.process.wait, 20)
    assert (place.run_dir / "run.json").read_text().count('"ended_at": null') == 0


async def test_after_a_long_time_without_any_coordinator_nothing_is_lost_and_nothing_is_told_twice(
    place: Place,
) -> None:
    first, ranks, found = await with_an_incident(place)
    first.end()
    for rank in ranks:
        for step in range(4, 8):
            rank.step(step)
        # As after a minute: each introduces himself again, and the journal is old.
        rank.uplink._carrier._greeted_s -= 61.0
    long_ago_s = time.time() - 600.0
    for segment in (place.run_dir / "journal").iterdir():
        os.utime(segment, (long_ago_s, long_ago_s))
    await asyncio.sleep(3.0)
    second = place.coordinator()
    await eventually(lambda: place.leader() == second.pid, PATIENCE_S)
    await eventually(lambda: "entries of a former coordinator" in second.log.read_text(), PATIENCE_S)
    steps = await eventually(
        lambda: {7} <= set(steps_in(place.run_dir / "journal").get(1, [])) and steps_in, PATIENCE_S
    )
    assert {0: {*range(8)}, 1: {*range(8)}} == {
        rank: set(told) for rank, told in steps(place.run_dir / "journal").items()
    }
    assert [found["id"]] == [one["id"] for one in place.incidents()]
    assert place.incidents()[0]["closed_at"] is None


async def test_another_life_of_the_job_is_not_taken_for_the_former_one(place: Place) -> None:
    first, ranks, found = await with_an_incident(place)
    first.end()
    for rank in ranks:
        rank.vanish()
    long_ago_s = time.time() - 600.0
    for segment in (place.run_dir / "journal").iterdir():
        os.utime(segment, (long_ago_s, long_ago_s))
    again = [place.rank(rank, key=f"another {rank}") for rank in range(2)]
    await asyncio.sleep(2.0)
    place.coordinator()
    for rank in again:
        rank.attach()
        rank.step(0)
    await eventually(lambda: all(rank.uplink.is_connected for rank in again), PATIENCE_S)
    await eventually(lambda: place.incidents()[0]["closed_at"] is not None, PATIENCE_S)
    assert [found["id"]] == [one["id"] for one in place.incidents()]
