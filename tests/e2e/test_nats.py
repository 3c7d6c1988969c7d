"""The same job over both transports: the same diagnosis, the same halt; and no process of a rank has nats in it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT, Launcher

from nats_servers import Server, program

SCRIPT = ROOT / "deploy" / "examples" / "train_gpt.py"
NAN = ("--steps", 40, "--nan-rank", 1, "--nan-step", 12)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if program() is None:
        pytest.skip("nats-server is not installed")
    made = Server(tmp_path, "n0")
    made.start()
    made.wait()
    yield made
    made.kill()


def told(jobs: Launcher, env: dict[str, str]) -> tuple[Any, ...]:
    """What a job with one NaN comes to."""
    ended = jobs.run(SCRIPT, *NAN, by="scheduler", env={"HOLTER_ACTION": "halt"} | env)
    assert 93 == ended.code, ended.stderr[-2000:]
    (found,) = ended.alarms
    top, action = found["causes"][0], found["action"]
    return (
        top["cause"],
        top["ranks"],
        found["first_step"],
        action["directive"],
        action["checkpoint"],
        action["exit_code"],
    )


@pytest.mark.job
def test_a_nan_is_named_and_halted_over_both_transports_alike(jobs: Launcher, server: Server) -> None:
    over_nats = told(jobs, {"HOLTER_NATS": server.address})
    assert ("nonfinite_input", [1], 12, "halt", "checkpoints/12", 93) == over_nats
    assert "holter-run" in server.log or (server.directory / "n0" / "jetstream").exists(), "it went through the server"
    assert over_nats == told(jobs, {})


@pytest.mark.job
@pytest.mark.release
def test_a_hosts_agent_in_between_changes_nothing(jobs: Launcher, server: Server) -> None:
    through = {"HOLTER_NATS": server.address, "HOLTER_AGENT": "auto"}
    assert ("nonfinite_input", [1], 12, "halt", "checkpoints/12", 93) == told(jobs, through)
    (log,) = jobs.directory.glob("run-*/logs/agent-*.log")
    assert "serving at" in log.read_text()


@pytest.mark.slow
def test_a_rank_that_reports_through_nats_does_not_import_it() -> None:
    seen = "import sys, holter, holter.frameworks.attach; print('nats' in sys.modules, 'torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", seen],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"HOLTER_NATS": "nats://x:1"},
    )
    assert "False True" == ran.stdout.strip()


@pytest.mark.slow
def test_a_sidecar_without_nats_does_not_import_it_either() -> None:
    seen = "import sys, holter.sidecar.service, holter.cli.coordinator, holter.coordinator.service; print('nats' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True, timeout=120)
    assert "False" == ran.stdout.strip()
