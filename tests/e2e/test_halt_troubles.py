"""A halt that meets trouble: coordinator or sidecars killed in the middle of it, a full disk, a save that hangs; and whoever asks for one.

Either the halt completes or training goes on; never a deadlock, never a half checkpoint that is called good, and what was good stays so.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import BIN
from tests.e2e.resuming import HALT, halt_json, results, same_bits

from holter.halting.vault.store import Vault
from processes import kill, processes_of

SCRIPTS = Path(__file__).parent / "scripts"
LOOP = SCRIPTS / "resumable_loop.py"
AT, EVERY, STEPS = 8, 2, 16

pytestmark = pytest.mark.job


def start(nursery: Any, folder: Path, *arguments: object, **env: str) -> Any:
    folder.mkdir()
    words = [str(LOOP), "--kind", "ddp", "--out", str(folder / "out"), *map(str, arguments)]
    return nursery.start(folder, words, env=HALT | env)


def ended_well(job: Any) -> Any:
    ended = job.wait()
    assert ended.code == 0, ended.stderr[-3000:]
    return ended


@pytest.fixture(scope="module")
def reference(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Without a fault."""
    folder = tmp_path_factory.mktemp("troubles") / "reference"
    ended_well(start(nursery, folder))
    return results(folder / "out", 2)


def resume(nursery: Any, folder: Path, ended: Any, reference: list[dict[str, Any]]) -> None:
    """From what a halt kept: the same bits."""
    halt = halt_json(ended.run_dir)
    assert ("healthy", 93) == (halt["verdict"], halt["exit_code"]), halt["why"]
    ended_well(start(nursery, folder, "--resume", ended.run_dir / halt["checkpoint"]))
    same_bits(reference, results(folder / "out", 2), str(halt["step"] * EVERY))


def no_half_is_called_good(run_dir: Path) -> None:
    """Whatever has a name is whole."""
    for sealed in Vault(run_dir).all():
        code = subprocess.run([BIN / "holter", "checkpoint", "verify", sealed.path], capture_output=True, check=False)
        assert (sealed.verdict == "healthy") == (code.returncode == 0)
    assert not Vault(run_dir).damaged()


@pytest.mark.parametrize("moment", [pytest.param("held", marks=pytest.mark.release), "saving"])
@pytest.mark.parametrize("victim", ["coordinator", pytest.param("sidecar", marks=pytest.mark.release)])
def test_holters_own_processes_are_killed_in_the_middle_of_a_halt(  # noqa: PLR0917
    victim: str, moment: str, nursery: Any, reference: list[dict[str, Any]], tmp_path: Path, wait_for: Any
) -> None:
    job = start(nursery, tmp_path / "faulted", "--fault", "nan", "--at", AT, "--pause", 0.4)
    log = job.run_dir / "logs" / "sidecar-1.log"
    wait_for(lambda: (log.exists() and f"the rank is {moment}" in log.read_text()) or job.has_ended, 60, moment)
    kill(process for process in processes_of(job.run_dir) if victim in process.words)
    ended = job.wait()
    assert ended.code in (0, 93), ended.stderr[-3000:]
    no_half_is_called_good(ended.run_dir)
    if (ended.run_dir / "halt.json").exists():
        resume(nursery, tmp_path / "resumed", ended, reference)
    else:
        assert list(results(tmp_path / "faulted" / "out", 2)[0]["losses"])[-1] == str(STEPS * EVERY - 1), (
            "it trained on"
        )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False, capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount a small disk here: {made.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.release
def test_on_a_full_disk_the_last_good_state_stays_and_what_was_not_saved_is_said(
    nursery: Any, small_disk: Path, tmp_path: Path
) -> None:
    good = small_disk / "run" / "checkpoints" / "4"
    good.mkdir(parents=True)
    (good / "manifest.json").write_text("as good as it was")
    size = ["--width", 400]
    job = start(nursery, tmp_path / "job", "--fault", "nan", "--at", AT, *size, HOLTER_RUN_DIR=str(small_disk / "run"))
    ended = job.wait()
    assert ended.code == 93, ended.stderr[-3000:]
    assert "as good as it was" == (good / "manifest.json").read_text()
    assert not (small_disk / "run" / "checkpoints" / str(AT)).exists()
    assert re.search(r"holter: halted after 8 steps.*No space left", ended.stderr), ended.stderr[-2000:]


@pytest.mark.release
def test_without_a_directory_to_save_into_the_run_is_halted_all_the_same_and_says_so(
    nursery: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").write_text("in the way")
    ended = start(nursery, tmp_path / "job", "--fault", "nan", "--at", AT, HOLTER_RUN_DIR=str(run_dir)).wait()
    assert ended.code == 93, ended.stderr[-3000:]
    halt = halt_json(run_dir)
    assert (None, "nonfinite_input") == (halt["checkpoint"], halt["cause"])
    assert "nothing was saved" in halt["why"]
    assert any("nothing was saved" in one["action"]["reason"] for one in ended.diagnoses)


@pytest.mark.release
def test_a_save_that_hangs_is_given_up_and_the_run_ends(nursery: Any, tmp_path: Path) -> None:
    job = start(nursery, tmp_path / "job", "--fault", "nan", "--at", AT, "--hang-in-save", HOLTER_SAVE_DEADLINE_S="3")
    ended = job.wait()
    assert ended.code == 93, ended.stderr[-3000:]
    halt = halt_json(ended.run_dir)
    assert (None, "incomplete") == (halt["checkpoint"], halt["verdict"])
    assert "the save was not over after 3 s" in halt["why"]
    no_half_is_called_good(ended.run_dir)


def test_a_signal_that_is_mapped_to_a_halt_asks_for_one(
    nursery: Any, reference: list[dict[str, Any]], tmp_path: Path, wait_for: Any
) -> None:
    job = start(nursery, tmp_path / "job", "--pause", 1.0, HOLTER_HALT_SIGNALS="SIGUSR1")
    wait_for(lambda: "step 3" in (job.directory / "stdout").read_text(), 60, "the third step")
    leader = psutil.Process(int((job.directory / "leader").read_text()))
    leader.children()[0].send_signal(signal.SIGUSR1)
    ended = job.wait()
    assert ended.code == 93, ended.stderr[-3000:]
    assert "requested" == halt_json(ended.run_dir)["cause"]
    resume(nursery, tmp_path / "resumed", ended, reference)


@pytest.mark.release
def test_ctrl_c_works_while_ranks_stand(nursery: Any, tmp_path: Path, wait_for: Any) -> None:
    """Nobody decides: the coordinator is stopped, and the ranks stand."""
    job = start(nursery, tmp_path / "job", "--fault", "nan", "--at", AT, "--pause", 0.2)
    wait_for(lambda: "step 3" in (job.directory / "stdout").read_text(), 60, "the third step")
    coordinator = next(process for process in processes_of(job.run_dir) if "coordinator" in process.words)
    coordinator.send(signal.SIGSTOP)
    log = job.run_dir / "logs" / "sidecar-0.log"
    wait_for(lambda: log.exists() and "the rank is held" in log.read_text(), 60, "a rank that stands")
    for rank in psutil.Process(int((job.directory / "leader").read_text())).children():
        rank.send_signal(signal.SIGINT)
    wait_for(lambda: job.has_ended, 15, "the end after Ctrl-C")
    coordinator.send(signal.SIGCONT)
    assert "KeyboardInterrupt" in (job.directory / "stderr").read_text()
    assert not (job.run_dir / "halt.json").exists()
    job.wait()


def test_a_hang_inside_an_optimizers_step_goes_back_to_the_last_snapshot(nursery: Any, tmp_path: Path) -> None:
    """Shards: rank 1's weights are partly new, and rank 0 is a step further."""
    fsdp = ["--kind", "fsdp"]
    ended_well(start(nursery, tmp_path / "reference", *fsdp))
    how = [*fsdp, "--fault", "torn", "--at", AT, "--pause", 0.1]
    ended = start(nursery, tmp_path / "job", *how, HOLTER_SNAPSHOT_EVERY="3").wait()
    assert ended.code == 93, ended.stderr[-3000:]
    halt = halt_json(ended.run_dir)
    assert (6, "checkpoints/6/state", "healthy") == tuple(halt[key] for key in ("step", "checkpoint", "verdict")), halt
    ended_well(start(nursery, tmp_path / "resumed", *fsdp, "--resume", ended.run_dir / halt["checkpoint"]))
    same_bits(results(tmp_path / "reference" / "out", 2), results(tmp_path / "resumed" / "out", 2), str(6 * EVERY))


@pytest.mark.release
def test_torchrun_does_not_start_a_halted_run_again(jobs: Any, tmp_path: Path) -> None:
    job = jobs.start(
        LOOP, "--kind", "ddp", "--out", tmp_path / "out", "--fault", "nan", "--at", AT, env=HALT,
        launching=["--max-restarts", "3"],
    )  # fmt: skip
    ended = job.wait()
    assert ended.code != 0
    assert 1 == ended.stdout.count("fault at "), "it was not begun again"
    assert 93 == halt_json(ended.run_dir)["exit_code"]
    again = jobs.run(
        LOOP, "--kind", "ddp", "--out", tmp_path / "out", env=HALT | {"HOLTER_RUN_DIR": str(ended.run_dir)}
    )
    assert again.code != 0
    assert "not started again blindly" in again.stderr


def test_holter_launch_passes_the_decision_on_and_holter_resume_goes_on(
    reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", LOOP, "--kind", "ddp", "--out", tmp_path / "out"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOLTER")} | {
        "OMP_NUM_THREADS": "1",
        "HOLTER_LINGER_S": "0",
    }

    def holter(*words: object) -> "subprocess.CompletedProcess[str]":
        command = [str(word) for word in (BIN / "holter", *words)]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False
        )

    halted = holter("launch", "--run-dir", run_dir, "--", *job, "--fault", "nan", "--at", AT)
    assert 93 == halted.returncode, halted.stderr[-3000:]
    assert 93 == holter("launch", "--run-dir", run_dir, "--", *job).returncode
    state = run_dir / halt_json(run_dir)["checkpoint"]
    resumed = holter("resume", run_dir, "--", *job, "--resume", state)
    assert 0 == resumed.returncode, resumed.stderr[-3000:]
    same_bits(reference, results(tmp_path / "out", 2), str(AT * EVERY))
    assert json.loads(holter("checkpoint", "list", run_dir, "--json").stdout)[0]["verdict"] == "healthy"
