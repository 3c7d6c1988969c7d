"""The documented configuration on a real server: who may report cannot order, who may read cannot publish, nobody speaks as another."""

import asyncio
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import ROOT
from tests.coordinator.conftest import TOKEN, eventually
from tests.transport.nats.conftest import Place

from holter.agent.service import HostAgent, HostAgentSettings
from holter.records import Nonfinite
from holter.transport.limits import UplinkSettings
from holter.transport.nats.line import NatsPlace, OpenLine, line_to
from holter.transport.nats.subjects import Subjects, host_name
from nats_servers import Server, program

RUN = "run-1"
NAN = [Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)]


def maker() -> Any:
    """The script that a user runs."""
    spec = importlib.util.spec_from_file_location("make_credentials", ROOT / "deploy" / "nats" / "make_credentials.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented(directory: Path) -> str:
    """Of `server.conf` what says who may come in."""
    text = (ROOT / "deploy" / "nats" / "server.conf").read_text()
    return text[text.index("authorization") :].replace('"users.conf"', f'"{directory.name}/users.conf"')


@pytest.fixture(params=[RUN, ""], ids=["one-run", "every-run"])
def guarded(tmp_path: Path, request: Any) -> Iterator[tuple[Server, str]]:
    """A server with accounts, and where the seeds are."""
    if program() is None:
        pytest.skip("nats-server is not installed")
    seeds = tmp_path / "credentials"
    run = ["--run", request.param] if request.param else []
    assert 0 == maker().main([str(seeds), "--ranks", "2", "--hosts", "node-a", *run])
    made = Server(tmp_path, "n0", extra=documented(seeds))
    made.start()
    made.wait()
    yield made, str(seeds / "{who}.seed")
    made.kill()


async def is_denied(line: OpenLine, subject: str) -> bool:
    """Whether the server refuses this publication."""
    line.denied = ""
    await line.client.publish(subject, b"x")
    await line.client.flush()
    await asyncio.sleep(0.05)
    return "ermissions" in line.denied and subject.lower() in line.denied.lower()


async def test_nobody_does_what_is_not_theirs(guarded: tuple[Server, str]) -> None:
    server, seeds = guarded
    place, names = NatsPlace(server.address, seeds), Subjects(RUN)
    async with line_to(place, "rank-1") as rank:
        for own in (names.said("1"), names.hello("1"), names.alive("1"), names.clock):
            assert not await is_denied(rank, own), own
        orders = [names.told(who) for who in ("0", "1", "all")]
        others = [names.said("0"), names.hello("0"), names.alive("0"), names.said("host-node-a")]
        keys = [
            f"$KV.holter-runs.{RUN}",
            "$JS.API.STREAM.DELETE.holter-run-run-1",
            "$JS.API.STREAM.PURGE.holter-run-run-1",
        ]
        inboxes = ["_INBOX_coordinator.x", "_INBOX_rank-0.x"]
        for subject in [*orders, *others, *keys, *inboxes]:
            assert await is_denied(rank, subject), subject
        for heard in (names.told("0"), names.said("0"), "_INBOX_coordinator.>", "holter.>", ">"):
            rank.denied = ""
            await rank.client.subscribe(heard)
            await rank.client.flush()
            await asyncio.sleep(0.05)
            assert "ermissions" in rank.denied, heard
    async with line_to(place, "reader") as reader:
        for subject in [
            *orders,
            *others,
            *keys,
            names.said("1"),
            names.clock,
            f"$JS.API.CONSUMER.CREATE.{names.stream}",
        ]:
            assert await is_denied(reader, subject), subject
    async with line_to(place, "coordinator") as leader:
        for subject in [names.told("0"), names.told("all"), f"$KV.holter-runs.{RUN}"]:
            assert not await is_denied(leader, subject), subject
        for subject in [names.said("0"), "$JS.API.STREAM.DELETE.holter-run-run-1"]:
            assert await is_denied(leader, subject), subject


@pytest.mark.slow
async def test_a_run_is_watched_with_these_rights_and_no_more(guarded: tuple[Server, str], tmp_path: Path) -> None:
    server, seeds = guarded
    place = Place(tmp_path, server.address, env={"HOLTER_NATS_CREDENTIALS": seeds})
    try:
        first = place.coordinator()
        ranks = [place.rank(rank, credentials=seeds) for rank in range(2)]
        for rank in ranks:
            rank.attach()
            rank.step(0)
        await eventually(lambda: all(rank.uplink.is_connected for rank in ranks), 60.0)
        ranks[1].step(1, nonfinite=NAN)
        ranks[0].step(1)
        (found,) = await eventually(place.incidents, 60.0)
        second = await place.standby()
        first.end()
        await eventually(lambda: place.leader() == second.pid, 60.0)
        await eventually(lambda: all(rank.uplink.is_connected for rank in ranks), 60.0)
        assert [found["id"]] == [one["id"] for one in place.incidents()]
        logs = (place.run_dir / "logs" / "coordinator.log").read_text()
        assert "refuses" not in logs, logs
        assert "Permissions Violation" not in logs
    finally:
        await place.end()


def test_the_whole_configuration_is_one_that_the_server_takes(tmp_path: Path) -> None:
    if (found := program()) is None:
        pytest.skip("nats-server is not installed")
    maker().main([str(tmp_path), "--ranks", "3"])
    shutil.copy(ROOT / "deploy" / "nats" / "server.conf", tmp_path)
    checked = subprocess.run([found, "-t", "-c", tmp_path / "server.conf"], capture_output=True, text=True, check=False)
    assert 0 == checked.returncode, checked.stderr
    assert 0o600 == (tmp_path / "rank-2.seed").stat().st_mode & 0o777
    before = (tmp_path / "rank-2.seed").read_bytes()
    maker().main([str(tmp_path), "--ranks", "4"])
    assert before == (tmp_path / "rank-2.seed").read_bytes(), "who has one keeps it"


async def test_a_stranger_is_not_let_in(guarded: tuple[Server, str]) -> None:
    server, _ = guarded
    with pytest.raises(Exception, match=r"(?i)authorization"):
        async with line_to(NatsPlace(server.address), "rank-0"):
            pass


@pytest.mark.slow
async def test_an_agent_reports_for_its_ranks_with_the_hosts_own_credential(
    guarded: tuple[Server, str], place_at: Callable[..., Place], tmp_path: Path
) -> None:
    server, seeds = guarded
    place = place_at(server.address, run_id=RUN, env={"HOLTER_NATS_CREDENTIALS": seeds})
    place.coordinator()
    path, uplink = tmp_path / "agents" / "one.sock", UplinkSettings(credentials=seeds)
    agent = HostAgent(HostAgentSettings(path, server.address, TOKEN, RUN, uplink=uplink))
    agent.speech._hello = msgspec.structs.replace(agent.speech._hello, host="node-a")
    agent._carrier._name = host_name("node-a")  # type: ignore[attr-defined]
    serving = asyncio.create_task(agent.run())
    try:
        await eventually(path.is_socket, 30.0)
        ranks = [place.rank(rank, agent=str(path)) for rank in range(2)]
        for rank in ranks:
            rank.attach()
            rank.step(0)
        ranks[1].step(1, nonfinite=NAN)
        ranks[0].step(1)
        (found,) = await eventually(place.incidents, 60.0)
        assert [1] == found["causes"][0]["ranks"]
        assert all(rank.uplink.is_by_agent for rank in ranks)
    finally:
        agent.stop()
        await asyncio.wait({serving}, timeout=10.0)
