"""Whom Prometheus shall scrape."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.coordinator.conftest import eventually

from holter.coordinator.disk import Disk
from holter.coordinator.http.targets import LOOK_EVERY, TargetsFile, all_targets, sidecar_targets
from holter.coordinator.incidents.announcer import AnnouncerSettings
from holter.coordinator.roster import Roster
from holter.transport import wire


def hello(rank: int, address: str) -> wire.Hello:
    return wire.Hello(
        run_id="r", rank=rank, world_size=8, host=f"node-{rank}", rank_pid=rank, sidecar_pid=1, metrics_address=address
    )


def test_every_sidecar_is_listed_by_an_address_that_others_reach() -> None:
    roster = Roster()
    for rank, address in enumerate(["127.0.0.1:9", "0.0.0.0:9401", "", "::1:7", "[::]:7", "10.0.0.1:8"]):
        roster.connect(hello(rank, address))
    roster.goodbye(5)
    found = sidecar_targets(roster, "r")
    assert [["127.0.0.1:9"], ["node-1:9401"], ["[::1]:7"], ["node-4:7"]] == [group["targets"] for group in found]
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
