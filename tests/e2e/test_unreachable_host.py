"""A host that is cut off in the middle of a step, and a sidecar that says nothing while its rank trains on.

Rank 1 and its sidecar live in a network namespace under a host name of their own, rank 0 and the coordinator outside; a pair of virtual
interfaces joins them. Taking one end down is what a lost host looks like: silence, no reset, and gloo waits for half an hour.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import BIN, Ended, Job, _environ

from processes import kill_family, processes_of

SCRIPT = Path(__file__).parent / "scripts" / "bits.py"
HOST = "node-b"
pytestmark = pytest.mark.job


@dataclass
class OtherHost:
    """A namespace that is joined to ours by a link."""

    name: str
    ours: str
    """Our interface's address, theirs is the next."""
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)

    def ip(self, *words: str) -> None:
        """Run `ip`, which must work."""
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)

    def make(self) -> None:
        """Both ends up."""
        theirs = self.ours.removesuffix(".1") + ".2"
        self.ip("netns", "add", self.name)
        self.ip("link", "add", f"{self.name}a", "type", "veth", "peer", "name", f"{self.name}b", "netns", self.name)
        self.ip("addr", "add", f"{self.ours}/24", "dev", f"{self.name}a")
        self.ip("link", "set", f"{self.name}a", "up")
        self.ip("-n", self.name, "addr", "add", f"{theirs}/24", "dev", f"{self.name}b")
        self.ip("-n", self.name, "link", "set", "lo", "up")
        self.set_link("up")

    def set_link(self, state: str) -> None:
        """Their end: ours keeps its address, so that our own processes still find each other."""
        self.ip("-n", self.name, "link", "set", f"{self.name}b", state)

    def start(self, rank: int, environ: dict[str, str], directory: Path) -> None:
        """A rank here, or there."""
        command = [sys.executable, "-m", "holter", str(SCRIPT), "--steps", "1000000"]
        if rank:
            renamed = f'hostname {HOST} && exec "$@"'
            command = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", renamed, "sh", *command]
        place = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": f"{self.name}{'b' if rank else 'a'}"}
        with (directory / f"rank-{rank}.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=directory, env=environ | place, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True
            )
        self.ranks.append(process)

    def end(self) -> None:
        """Nothing of it is left."""
        for rank in self.ranks:
            if rank.poll() is None:
                kill_family(rank.pid)
            rank.wait(timeout=30)

    def unmake(self) -> None:
        """The link goes with the namespace."""
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True, timeout=30)


@pytest.fixture
def other_host() -> Iterator[OtherHost]:
    """Skipped, visibly, where namespaces cannot be made."""
    if missing := [program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    host = OtherHost(f"ho{os.getpid() % 100_000}", f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}.1")
    try:
        host.make()
        host.ip("netns", "exec", host.name, "unshare", "--uts", "true")
    except subprocess.CalledProcessError as error:
        host.unmake()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    yield host
    host.end()
    host.unmake()


def test_a_host_that_is_cut_off_is_named(
    other_host: OtherHost, tmp_path: Path, status: Callable[[Job], dict[str, Any]], wait_for: Callable[..., None]
) -> None:
    run_dir = tmp_path / "run"
    environ = _environ(
        {
            "HOLTER_RUN_DIR": str(run_dir),
            "HOLTER_LISTEN_HOST": other_host.ours,
            "MASTER_ADDR": other_host.ours,
            "MASTER_PORT": str(20_000 + os.getpid() % 10_000),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
        }
    )
    for rank in range(2):
        other_host.start(rank, environ, tmp_path)
    job = Job(tmp_path, run_dir)
    wait_for(lambda: min((rank["step"] or 0 for rank in status(job)["ranks"]), default=0) > 60, 120, "60 steps")
    assert ["connected", "connected"] == [rank["sidecar"] for rank in status(job)["ranks"]]
    other_host.set_link("down")
    wait_for(lambda: status(job)["ranks"][1]["sidecar"] == "silent", 30, "the silence to be heard")
    ended = Ended(0, "", "", tmp_path, run_dir)
    wait_for(lambda: ended.alarms, 60, "an incident")
    assert [None, None] == [rank.poll() for rank in other_host.ranks], "the job still hangs"
    (found,) = ended.alarms
    top = found["causes"][0]
    assert ("host_unreachable", [1]) == (top["cause"], top["ranks"])
    assert HOST in "\n".join([found["symptom"], *(evidence["summary"] for evidence in top["evidence"])])
    other_host.end()
    wait_for(lambda: not processes_of(run_dir), 60, "sidecars and coordinator to end")
    replayed = subprocess.run(
        [BIN / "holter", "replay", run_dir, "--json"], capture_output=True, check=False, timeout=60
    )
    again = json.loads(replayed.stdout)[0]
    assert (found["id"], "host_unreachable", [1]) == (
        again["id"],
        *(again["causes"][0][key] for key in ("cause", "ranks")),
    )


@pytest.mark.release
def test_a_sidecar_that_says_nothing_while_its_rank_trains_raises_no_alarm(
    jobs: Any, status: Callable[[Job], dict[str, Any]], wait_for: Callable[..., None]
) -> None:
    job = jobs.start(SCRIPT, "--steps", 1_000_000)
    wait_for(lambda: min((rank["step"] or 0 for rank in status(job)["ranks"]), default=0) > 60, 120, "60 steps")
    (sidecar,) = job.pids("sidecar", rank=1)
    os.kill(sidecar, signal.SIGSTOP)
    wait_for(lambda: status(job)["ranks"][1]["sidecar"] == "silent", 30, "the silence to be heard")
    assert any("silent" in blind for blind in status(job)["blind"])
    step = status(job)["ranks"][0]["step"]
    wait_for(lambda: status(job)["ranks"][0]["step"] > step + 200, 60, "200 more steps")
    os.kill(sidecar, signal.SIGCONT)
    wait_for(lambda: status(job)["ranks"][1]["sidecar"] == "connected", 30, "the sidecar to be heard again")
    assert [] == status(job)["incidents"]
