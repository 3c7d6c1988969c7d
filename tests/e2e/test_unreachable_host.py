"""A host that is cut off in the middle of a step, and a sidecar that says nothing while its rank trains on.

Rank 1 and its sidecar live in a network namespace under a host name of their own, rank 0 and the coordinator outside; a pair of virtual
interfaces joins them. Taking one end down is what a lost host looks like: silence, no reset, and gloo waits for half an hour.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import BIN, Ended, Job, _environ
from tests.e2e.conftest import HOST, SCRIPT, OtherHost

from nats_servers import Server, program
from processes import processes_of

pytestmark = pytest.mark.job


def test_a_host_that_is_cut_off_is_named(
    other_host: OtherHost, tmp_path: Path, status: Callable[[Job], dict[str, Any]], wait_for: Callable[..., None]
) -> None:
    cut_off(other_host, tmp_path, status, wait_for, {})


@pytest.mark.release
def test_a_host_that_is_cut_off_from_nats_is_named_too(
    other_host: OtherHost, tmp_path: Path, status: Callable[[Job], dict[str, Any]], wait_for: Callable[..., None]
) -> None:
    if program() is None:
        pytest.skip("nats-server is not installed")
    server = Server(tmp_path, "n0", host=other_host.ours)
    server.start()
    server.wait()
    try:
        cut_off(other_host, tmp_path, status, wait_for, {"HOLTER_NATS": server.address})
    finally:
        server.kill()


def cut_off(
    other_host: OtherHost,
    tmp_path: Path,
    status: Callable[[Job], dict[str, Any]],
    wait_for: Callable[..., None],
    more: dict[str, str],
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
        | more
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
