"""Do no harm: a run under holter ends with the same bits, whatever becomes of holter."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "bits.py"
pytestmark = pytest.mark.job


def digests(ended) -> list[str]:
    found = sorted(re.findall(r"digest of rank \d: [0-9a-f]{64}", ended.stdout))
    assert len(found) == 2, ended.stderr[-3000:]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory, request):
    """Digests of runs without holter, each made once."""
    launcher_type = request.getfixturevalue("launcher_type")
    made = {}

    def digest(*arguments) -> list[str]:
        if arguments not in made:
            launcher = launcher_type(tmp_path_factory.mktemp("bare"))
            made[arguments] = digests(launcher.run(SCRIPT, *arguments, attached=False, by="scheduler"))
        return made[arguments]

    return digest


def test_weights_and_random_states_are_bit_identical(jobs, bare):
    ended = jobs.run(SCRIPT, "--mode", "plain", by="scheduler")
    assert ended.code == 0
    assert digests(ended) == bare("--mode", "plain")
    assert ended.diagnoses == []


@pytest.mark.release
@pytest.mark.parametrize("mode", ["accumulate", "bf16", "bucket_view"])
def test_they_are_in_every_mode(forks, bare, mode):
    ended = forks.run(SCRIPT, "--mode", mode)
    assert ended.code == 0
    assert digests(ended) == bare("--mode", mode)
    assert ended.diagnoses == []


@pytest.mark.release
def test_snapshots_change_no_bit_and_are_said_once(forks, bare):
    ended = forks.run(SCRIPT, "--mode", "accumulate", env={"HOLTER_SNAPSHOT_EVERY": "3"})
    assert ended.code == 0
    assert digests(ended) == bare("--mode", "accumulate")
    assert ended.diagnoses == []
    said = [line for line in ended.holter_lines if "snapshot" in line or "copied in memory" in line]
    assert 1 == len(said)
    assert "every 3 steps the training state is copied in memory" in said[0]


def test_a_run_that_meets_a_nan_goes_on_with_the_same_bits(forks, bare):
    """The replay that looks for the NaN's origin leaves no trace, although the model has batch statistics and dropout."""
    ended = forks.run(SCRIPT, "--nan-step", 50, "--steps", 60)
    assert digests(ended) == bare("--nan-step", 50, "--steps", 60)
    assert ended.top["cause"] == "nonfinite_input"


def states(shown: dict) -> list[str]:
    return [rank["sidecar"] for rank in shown["ranks"]]


def kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


LONG = ("--steps", 1200)
PAUSE = ("--pause", 0.015)
"""Long enough to be missed by: a rank says that it has lost its sidecar after ten silent seconds."""


@pytest.mark.release
def test_killing_a_sidecar_changes_no_bit_and_is_shown(forks, bare, status, wait_for):
    job = forks.start(SCRIPT, *LONG, *PAUSE)
    wait_for(lambda: states(status(job)) == ["connected"] * 2, 60, "two sidecars")
    kill(job.pids("sidecar", rank=1))
    wait_for(lambda: states(status(job)) == ["connected", "gone"], 30, "the loss to be shown")
    ended = job.wait()
    assert digests(ended) == bare(*LONG)
    assert any("rank 1 trains unobserved: its sidecar" in line for line in ended.holter_lines)
    assert ended.diagnoses == []


def test_killing_the_coordinator_changes_no_bit_and_another_takes_its_place(forks, bare, status, wait_for):
    job = forks.start(SCRIPT, *LONG, *PAUSE)
    wait_for(lambda: states(status(job)) == ["connected"] * 2, 60, "two sidecars")
    first = job.pids("coordinator")
    kill(first)
    wait_for(lambda: set(job.pids("coordinator")) - set(first), 30, "another coordinator")
    wait_for(lambda: states(status(job)) == ["connected"] * 2, 30, "two sidecars again")
    ended = job.wait()
    assert digests(ended) == bare(*LONG)
    assert ended.diagnoses == []


@pytest.mark.release
def test_killing_all_of_us_changes_no_bit_and_every_rank_says_so(forks, bare, status, wait_for):
    job = forks.start(SCRIPT, *LONG, *PAUSE)
    wait_for(lambda: states(status(job)) == ["connected"] * 2, 60, "two sidecars")
    kill(job.pids("sidecar"))
    kill(job.pids("coordinator"))
    ended = job.wait()
    assert digests(ended) == bare(*LONG)
    for rank in (0, 1):
        assert any(f"rank {rank} trains unobserved: its sidecar" in line for line in ended.holter_lines)


@pytest.mark.release
def test_a_full_run_directory_changes_no_bit(forks, bare, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        (small / "filler").write_bytes(bytes(40 << 10))
        ended = forks.run(SCRIPT, env={"HOLTER_RUN_DIR": str(small / "run")})
    finally:
        subprocess.run(["umount", "-l", small], check=True)
    assert ended.code == 0
    assert digests(ended) == bare("--mode", "plain")


@pytest.mark.release
def test_an_unwritable_run_directory_is_said_and_changes_no_bit(forks, bare, tmp_path):
    (tmp_path / "file").write_text("")
    ended = forks.run(SCRIPT, env={"HOLTER_RUN_DIR": str(tmp_path / "file" / "run")})
    assert ended.code == 0
    assert digests(ended) == bare("--mode", "plain")
    assert any("cannot write to" in line for line in ended.holter_lines)


@pytest.mark.release
def test_a_page_that_cannot_be_made_is_said_and_changes_no_bit(forks, bare):
    ended = forks.run(SCRIPT, env={"HOLTER_RING_BYTES": str(1 << 60)})
    assert ended.code == 0
    assert digests(ended) == bare("--mode", "plain")
    assert sum("trains unobserved" in line for line in ended.holter_lines) == 2


@pytest.mark.release
def test_a_wrong_setting_in_a_job_is_said_and_training_goes_on(jobs, bare):
    ended = jobs.run(SCRIPT, attached=False, env={"HOLTER": "1", "HOLTER_OVERHEAD_BUDGET": "fast"}, by="scheduler")
    assert ended.code == 0
    assert digests(ended) == bare("--mode", "plain")
    assert any("HOLTER_OVERHEAD_BUDGET must be a number, got 'fast'" in line for line in ended.holter_lines)


@pytest.mark.release
def test_a_hostile_coordinator_changes_no_bit(forks, bare, hostile_server):
    ended = forks.run(SCRIPT, env={"HOLTER_COORDINATOR": hostile_server, "HOLTER_TOKEN": "secret"})
    assert ended.code == 0
    assert digests(ended) == bare("--mode", "plain")


@pytest.mark.release
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_of_the_data_loader_is_not_a_rank(jobs, bare, method):
    arguments = ("--workers", 2, "--start-method", method, "--steps", 20)
    ended = jobs.run(SCRIPT, *arguments, by="scheduler")
    assert ended.code == 0
    assert digests(ended) == bare(*arguments)
    assert ended.diagnoses == []
    assert sum("watching" in line for line in ended.holter_lines) == 1
