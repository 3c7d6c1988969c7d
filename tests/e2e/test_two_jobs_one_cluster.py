"""Two real jobs, each in a network namespace of its own, on one NATS cluster of three in three others: a hang and a NaN are each named, while a server and a coordinator die."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT, _environ
from tests.e2e.conftest import SCRIPT

from nats_servers import Server, cluster_of, program
from network import Network, NoNetworkError
from processes import kill, kill_family, processes_of

pytestmark = [pytest.mark.job, pytest.mark.release, pytest.mark.timeout(1200)]
PATIENCE_S = 300.0


@dataclass
class Site:
    network: Network
    servers: list[Server]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if program() is None:
        pytest.skip("nats-server is not installed")
    try:
        with Network(["n0", "n1", "n2", "a", "b"]) as network:
            names = ["n0", "n1", "n2"]
            servers = cluster_of(
                tmp_path, [network.address[name] for name in names], [network.within(name) for name in names]
            )
            yield Site(network, servers)
            for server in servers:
                server.kill()
    except NoNetworkError as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")


@dataclass
class Job:
    """Two ranks by the environment, on one host."""

    run_dir: Path
    process: subprocess.Popen[str]

    def incidents(self) -> list[dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in self.run_dir.glob("incidents/*/diagnosis.json")]
        return [one for one in found if one["severity"] == "critical"]

    def leader(self) -> int:
        try:
            return int(json.loads((self.run_dir / "coordinator.json").read_text())["pid"])
        except (OSError, ValueError):
            return 0

    def steps(self) -> int:
        """As the coordinator's journal grows: bytes, which is enough to see that it is heard."""
        return sum(path.stat().st_size for path in self.run_dir.glob("journal/*.msgpack"))


def start(site: Site, tmp_path: Path, host: str, *words: object) -> Job:
    run_dir = tmp_path / f"run-{host}"
    address = ",".join(server.address for server in site.servers)
    environ = _environ({"HOLTER_RUN_DIR": str(run_dir), "HOLTER_NATS": address})
    command = [*site.network.within(host), sys.executable, str(ROOT / "tests" / "start_ranks.py"), "2", "-m", "holter"]
    with (tmp_path / f"{host}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *map(str, words)],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )
    return Job(run_dir, process)


def test_a_hang_and_a_nan_are_named_while_a_server_and_a_coordinator_die(
    site: Site, tmp_path: Path, wait_for: Callable[..., None]
) -> None:
    train = ROOT / "deploy" / "examples" / "train_gpt.py"
    # The hang comes from outside: rank 1 is stopped when the servers and the coordinator have had their turn.
    hangs = start(site, tmp_path, "a", SCRIPT, "--steps", 1_000_000, "--pause", 0.05)
    spoiled = start(site, tmp_path, "b", train, "--steps", 1_000_000, "--nan-rank", 1, "--nan-step", 150)
    try:
        wait_for(lambda: hangs.leader() and spoiled.leader(), PATIENCE_S, "two coordinators")
        wait_for(lambda: hangs.steps() > 20_000, PATIENCE_S, "steps of the first job")
        site.servers[0].kill()
        time.sleep(3.0)
        leader = hangs.leader()
        os.kill(leader, signal.SIGKILL)
        wait_for(lambda: hangs.leader() not in {0, leader}, PATIENCE_S, "another coordinator")
        before = hangs.steps()
        wait_for(lambda: hangs.steps() > before, PATIENCE_S, "the first job to be heard again")
        ranks = [one for one in _ranks(hangs) if one[1] == 1]
        assert ranks, "rank 1 of the first job"
        os.kill(ranks[0][0], signal.SIGSTOP)
        wait_for(hangs.incidents, PATIENCE_S, "the hang to be named")
        wait_for(spoiled.incidents, PATIENCE_S, "the NaN to be named")
        (hang,), (nan,) = hangs.incidents(), spoiled.incidents()
        assert ("rank_suspended", [1]) == (hang["causes"][0]["cause"], hang["causes"][0]["ranks"])
        assert ("nonfinite_input", [1]) == (nan["causes"][0]["cause"], nan["causes"][0]["ranks"])
        assert 150 == nan["first_step"]
    finally:
        for job in (hangs, spoiled):
            for pid, _ in _ranks(job):
                os.kill(pid, signal.SIGCONT)
            kill_family(job.process.pid)
            job.process.wait(timeout=30)
            kill(processes_of(job.run_dir))


def _ranks(job: Job) -> list[tuple[int, int]]:
    """(process, rank) of the job's own ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"holter" in words and f"HOLTER_RUN_DIR={job.run_dir}".encode() in environ:
            rank = next((int(word[5:]) for word in environ if word.startswith(b"RANK=")), -1)
            if rank >= 0:
                found.append((int(folder.name), rank))
    return found
