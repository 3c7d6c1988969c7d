"""Several hosts in network namespaces, each with its address: who is cut off from whom, that nobody is accused falsely, and that everything heals."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT
from tests.coordinator.conftest import eventually
from tests.transport.nats.conftest import Place, Process

from holter.coordinator.recovery import journal
from holter.records import StepDone
from nats_servers import Server, cluster_of, program
from network import Network, NoNetworkError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE_S = 120.0


@dataclass
class Site:
    """Servers n0 to n2, coordinators c0 and c1, hosts h0 and h1 with a rank each."""

    place: Place
    network: Network
    servers: list[Server]
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)

    def coordinator(self, host: str) -> Process:
        return self.place.coordinator("--host", self.network.address[host], within=self.network.within(host))

    def rank(self, rank: int) -> None:
        script = Path(__file__).parent / "made_up_rank.py"
        command = [*self.network.within(f"h{rank}"), sys.executable, str(script), self.place.address, self.place.run_id]
        environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        with (self.place.directory / f"rank-{rank}.log").open("w") as log:
            self.ranks.append(
                subprocess.Popen(
                    [*command, str(rank), "2"], env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
                )
            )

    def status(self) -> dict[str, Any]:
        """What the leader says; empty if it cannot be reached from here."""
        try:
            address = json.loads((self.place.run_dir / "coordinator.json").read_text())["address"]
            with urllib.request.urlopen(f"{address}/api/v1/status", timeout=2) as found:
                return dict(json.loads(found.read()))
        except (OSError, ValueError):
            return {}

    def states(self) -> list[str]:
        return [rank["sidecar"] for rank in self.status().get("ranks", [])]

    def steps(self) -> list[int]:
        return [rank["step"] or 0 for rank in self.status().get("ranks", [])]

    async def trains(self, more: int = 12) -> None:
        """Both are heard, and go on."""
        await eventually(lambda: self.states() == ["connected", "connected"], PATIENCE_S)
        before = self.steps()
        await eventually(
            lambda: all(now > then + more for now, then in zip(self.steps(), before, strict=False)), PATIENCE_S
        )

    async def ends_well(self) -> None:
        """Every step of both ranks was heard, whoever led, and nobody was accused."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            await asyncio.to_thread(rank.wait, 60)
        said = [(self.place.directory / f"rank-{number}.log").read_text().split() for number in range(2)]
        assert [["True"], ["True"]] == [words[1:] for words in said], said
        expected = {(rank, step) for rank in range(2) for step in range(int(said[rank][0]))}
        entries = journal.read(self.place.run_dir / "journal")
        heard = {
            (one.observation.rank, one.observation.step)
            for one in entries
            if isinstance(one.observation.body, StepDone)
        }
        assert set() == expected - heard
        assert [] == [found["symptom"] for found in self.place.incidents() if found["severity"] == "critical"]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    if program() is None:
        pytest.skip("nats-server is not installed")
    try:
        with Network(["n0", "n1", "n2", "c0", "c1", "h0", "h1"]) as network:
            names = ["n0", "n1", "n2"]
            servers = cluster_of(
                tmp_path, [network.address[name] for name in names], [network.within(name) for name in names]
            )
            place = Place(tmp_path, ",".join(server.address for server in servers))
            made = Site(place, network, servers)
            yield made
            for rank in made.ranks:
                rank.kill()
                rank.wait()
            await place.end()
            for server in servers:
                server.kill()
    except NoNetworkError as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")


async def test_a_coordinator_that_is_cut_off_is_followed_and_stands_by_when_it_is_back(site: Site) -> None:
    first = site.coordinator("c0")
    for rank in range(2):
        site.rank(rank)
    await site.trains()
    second = site.coordinator("c1")
    await eventually(lambda: second.stands_by, PATIENCE_S)
    site.network.cut("c0")
    await eventually(lambda: site.place.leader() == second.pid, PATIENCE_S)
    await site.trains()
    site.network.join("c0")
    await eventually(lambda: first.stands_by, PATIENCE_S)
    assert site.place.leader() == second.pid
    await site.trains()
    await site.ends_well()


@pytest.mark.release
async def test_a_server_that_does_not_reach_the_others_is_left_and_all_is_heard(site: Site) -> None:
    site.coordinator("c0")
    for rank in range(2):
        site.rank(rank)
    await site.trains()
    for lonely in ("n0", "n1", "n2"):
        others = [name for name in ("n0", "n1", "n2") if name != lonely]
        for other in others:
            site.network.part(lonely, other)
        await asyncio.sleep(12.0)
        await site.trains()
        for other in others:
            site.network.unite(lonely, other)
        await asyncio.sleep(5.0)
        await site.trains()
    await site.ends_well()


@pytest.mark.release
async def test_a_host_that_is_cut_off_falls_silent_and_is_heard_again_with_all_it_said(site: Site) -> None:
    site.coordinator("c0")
    for rank in range(2):
        site.rank(rank)
    await site.trains()
    site.network.cut("h1")
    await eventually(lambda: site.states() == ["connected", "silent"], PATIENCE_S)
    await asyncio.sleep(5.0)
    assert ["connected", "silent"] == site.states(), "a line that is cut is not one that was closed"
    site.network.join("h1")
    await site.trains()
    await site.ends_well()
