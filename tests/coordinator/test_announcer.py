"""Real HTTP: a webhook that takes messages, refuses them, is away, or comes back."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.coordinator.conftest import eventually

from holter.coordinator.announcer import (
    LOOK_EVERY,
    MAX_WAITING,
    AnnouncerSettings,
    TargetsFile,
    WebhookSender,
    WebhookSettings,
    all_targets,
    sidecar_targets,
)
from holter.coordinator.disk import Disk
from holter.coordinator.roster import Roster
from holter.exporters.webhook import Deliveries
from holter.records import Nonfinite
from holter.transport import wire
from holter.transport.limits import Backoff


@dataclass
class Receiver:
    """What came, and the statuses with which it is answered; the last one for ever."""

    statuses: list[int] = field(default_factory=lambda: [200])
    received: list[Any] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    url: str = ""

    async def take(self, request: web.Request) -> web.Response:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        self.tokens.append(request.headers.get("Authorization", ""))
        if status == 200:
            self.received.append(await request.json())
        return web.Response(status=status, headers={"Location": self.url})


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    app = web.Application()
    app.router.add_post("/", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    yield made
    await runner.cleanup()


def courier(url: str, token_file: str = "") -> tuple[WebhookSender, Deliveries]:
    deliveries = Deliveries()
    made = WebhookSender(WebhookSettings(url, token_file), deliveries, Backoff(first_s=0.01, cap_s=0.05))
    made.start()
    return made, deliveries


async def test_messages_come_in_order_with_the_token_of_the_moment(receiver: Receiver, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("first\n")
    sender, deliveries = courier(receiver.url, str(secret))
    sender.send({"n": 1})
    await eventually(lambda: receiver.received)
    secret.write_text("second\n")
    sender.send({"n": 2})
    await sender.close(5.0)
    assert [{"n": 1}, {"n": 2}] == receiver.received
    assert ["Bearer first", "Bearer second"] == receiver.tokens
    assert ({"delivered": 2}, []) == (deliveries.counts, deliveries.warnings())


async def test_a_webhook_that_comes_back_gets_everything(receiver: Receiver) -> None:
    receiver.statuses = [500, 302, 429, 401, 403, 404, 200]
    sender, deliveries = courier(receiver.url)
    sender.send({"n": 1})
    sender.send({"n": 2})
    await sender.close(5.0)
    assert [{"n": 1}, {"n": 2}] == receiver.received
    assert {"failed": 6, "delivered": 2} == deliveries.counts
    assert [] == deliveries.warnings()


async def test_a_message_that_is_refused_is_not_sent_for_ever_and_not_hidden(receiver: Receiver) -> None:
    receiver.statuses = [400, 200]
    sender, deliveries = courier(receiver.url)
    sender.send({"n": 1})
    await eventually(lambda: deliveries.counts.get("dropped"))
    assert ["webhook: 1 attempts failed, 1 messages lost, last HTTP 400 Bad Request"] == deliveries.warnings()
    sender.send({"n": 2})
    await sender.close(5.0)
    assert [{"n": 2}] == receiver.received


async def test_nobody_there_and_no_token_are_counted_and_room_is_bounded(tmp_path: Path) -> None:
    sender, deliveries = courier("http://127.0.0.1:9/", str(tmp_path / "none"))
    for number in range(MAX_WAITING + 3):
        sender.send({"n": number})
    assert 3 == deliveries.counts["dropped"]
    await eventually(lambda: deliveries.counts.get("failed", 0) > 1)
    assert "FileNotFoundError" in deliveries.warnings()[0]
    await asyncio.wait_for(sender.close(0.1), 5.0)
    assert MAX_WAITING + 3 == deliveries.counts["dropped"]


@pytest.mark.slow
async def test_the_coordinator_pages_without_a_prometheus(run_coordinator: Any, receiver: Receiver) -> None:
    receiver.statuses = [503, 200]
    pages = "https://wiki.corp/holter"
    running = await run_coordinator(announcing=AnnouncerSettings(webhook=WebhookSettings(receiver.url), runbooks=pages))
    ranks = [running.rank(rank) for rank in range(2)]
    for rank in ranks:
        rank.attach()
        rank.step(0)
    ranks[0].step(1)
    ranks[1].step(1, nonfinite=[Nonfinite(where="input", name="batch['x']", nans=3, infs=0, numel=64)])
    (message,) = await eventually(lambda: receiver.received)
    assert ("firing", "HolterNonfiniteInput") == (message["status"], message["groupLabels"]["alertname"])
    assert "Rank 1." in message["commonAnnotations"]["description"]
    assert f"{pages}/nonfinite_input.md" == message["commonAnnotations"]["runbook_url"]
    for step in range(2, 6):
        for rank in ranks:
            rank.step(step)
    await asyncio.sleep(0.6)
    assert [message] == receiver.received, "once"
    _, metrics = await running.get("/metrics")
    assert 'holter_webhook_messages_total{outcome="delivered",run_id="run-1"} 1.0' in metrics
    assert 'holter_webhook_messages_total{outcome="failed",run_id="run-1"} 1.0' in metrics


@pytest.mark.slow
async def test_a_webhook_that_is_away_shows_in_the_status(run_coordinator: Any) -> None:
    running = await run_coordinator(
        announcing=AnnouncerSettings(webhook=WebhookSettings("http://127.0.0.1:9/"), deadline_s=0.1)
    )
    rank = running.rank(0, world_size=1)
    rank.attach()
    rank.step(0, nonfinite=[Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)])
    await eventually(lambda: running.coordinator.watched.deliveries.failure)
    _, status = await running.get("/api/v1/status")
    assert status["warnings"][0].startswith("webhook: ")


def hello(rank: int, address: str) -> wire.Hello:
    return wire.Hello(
        run_id="r", rank=rank, world_size=8, host=f"node-{rank}", rank_pid=rank, sidecar_pid=1, metrics_address=address
    )


def test_every_sidecar_is_listed_by_an_address_that_others_reach() -> None:
    roster = Roster()
    for rank, address in enumerate(["127.0.0.1:9", "10.0.0.1:9401", "", "[::1]:7", "https://10.0.0.2:7", "10.0.0.1:8"]):
        roster.connect(hello(rank, address))
    roster.goodbye(5)
    found = sidecar_targets(roster, "r")
    assert [["127.0.0.1:9"], ["10.0.0.1:9401"], ["[::1]:7"], ["10.0.0.2:7"]] == [group["targets"] for group in found]
    assert [None, None, None, "https"] == [group["labels"].get("__scheme__") for group in found]
    assert {
        "__meta_holter_run_id": "r",
        "__meta_holter_role": "sidecar",
        "__meta_holter_rank": "1",
        "__meta_holter_host": "node-1",
    } == found[1]["labels"]


def test_a_sidecar_that_is_lost_is_still_asked() -> None:
    roster = Roster()
    roster.disconnect(0, roster.connect(hello(0, "127.0.0.1:9")))
    assert [["127.0.0.1:9"]] == [group["targets"] for group in sidecar_targets(roster, "r")]


def test_the_coordinator_comes_first() -> None:
    assert [["node:9400"]] == [group["targets"] for group in all_targets(Roster(), "r", "http://node:9400")]


def test_a_coordinator_that_lingers_leaves_the_file_of_the_next_life_alone(tmp_path: Path) -> None:
    disk, roster = Disk(), Roster()
    old, new = (TargetsFile(tmp_path, "run", f"http://node:{port}", disk) for port in (1, 2))
    old.write(roster)
    new.write(roster)
    old.remove()
    assert disk.close(5.0)
    (path,) = tmp_path.iterdir()
    assert [["node:2"]] == [group["targets"] for group in json.loads(path.read_text())]


def test_a_file_that_somebody_took_away_comes_back(tmp_path: Path) -> None:
    disk, roster = Disk(), Roster()
    kept = TargetsFile(tmp_path, "run", "http://node:1", disk)
    kept.write(roster)
    disk.submit(lambda: next(tmp_path.iterdir()).unlink())
    for _ in range(LOOK_EVERY):
        kept.write(roster)
    assert disk.close(5.0)
    assert 1 == len(list(tmp_path.iterdir()))


async def test_the_port_and_the_shared_disk_tell_the_same(run_coordinator: Any, tmp_path: Path) -> None:
    folder = tmp_path / "targets"
    running = await run_coordinator(announcing=AnnouncerSettings(targets_dir=folder))
    path = folder / "holter-run-1.json"
    await eventually(path.exists)
    assert [[f"127.0.0.1:{running.port}"]] == [group["targets"] for group in json.loads(path.read_text())]
    ranks = [running.rank(rank, metrics_address=f"127.0.0.1:{7000 + rank}") for rank in range(2)]
    for rank in ranks:
        rank.attach()
    await eventually(lambda: len(json.loads(path.read_text())) == 3)
    code, served = await running.get("/sd")
    assert (200, json.loads(path.read_text())[1:]) == (code, served)
    assert [["127.0.0.1:7000"], ["127.0.0.1:7001"]] == [group["targets"] for group in served]
    await asyncio.gather(*(rank.end(1) for rank in ranks))
    await asyncio.wait_for(running.task, 8.0)
    assert not path.exists(), "a run that has ended has no targets"
