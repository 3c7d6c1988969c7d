"""deploy/slurm on a real Slurm of one node: a halt is held, a crash is requeued, a time limit leaves a checkpoint from which the job goes on to the same bits."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.conftest import ROOT, wait_for

SLURM = ROOT / "deploy" / "slurm"
GPT = ROOT / "deploy" / "examples" / "train_gpt.py"
SMALL = ("--width", "32", "--layers", "1", "--length", "16", "--vocabulary", "64")
PACED = """
import os, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: time.sleep(float(os.environ.get("PACE_S", "0"))))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
pytestmark = pytest.mark.job


def is_over(slurm, number: str) -> bool:
    """Ended, or waiting for a person."""
    return slurm.job(number)["JobState"] in {"COMPLETED", "SPECIAL_EXIT", "FAILED", "TIMEOUT", "CANCELLED"}


def run_dir(slurm, number: str) -> Path:
    return slurm.home / "work" / "holter-runs" / f"slurm-{number}"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here; `make system` installs it")
def test_the_scripts_are_clean():
    files = sorted([*SLURM.glob("*.sh"), *SLURM.glob("*.sbatch")])
    told = subprocess.run(
        ["shellcheck", "-x", "-s", "bash", *files], cwd=SLURM, capture_output=True, text=True, check=False
    )
    assert (0, "") == (told.returncode, told.stdout)


def test_93_is_held_and_never_requeued():
    lines = dict(line.split("=", 1) for line in (SLURM / "holter.conf").read_text().splitlines() if line[0] != "#")
    assert "93" == lines["RequeueExitHold"]
    assert "RequeueExit" not in lines


@pytest.mark.parametrize("when", ["before the command", "before its coordinator"])
def test_a_limit_that_comes_before_the_run_has_a_coordinator_is_not_lost(tmp_path, when):
    ask = tmp_path / "holter"
    ask.write_text("#!/bin/bash\necho asked >> asked\n[[ $(wc -l < asked) -ge 3 ]] && touch heard\n")
    ask.chmod(0o755)
    early, late = ("kill -USR1 $$", "") if when == "before the command" else ("", "kill -USR1 $PPID;")
    waiting = f"{late} until [[ -e heard ]]; do sleep 0.1; done"
    script = f"source {SLURM}/holter.sh\n{early}\nholter_run bash -c '{waiting}'"
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    told = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert 0 == told.returncode, told.stderr
    assert 3 == (tmp_path / "asked").read_text().count("asked")


def test_a_halt_is_held_and_a_release_does_not_lift_it(slurm):
    number = slurm.submit(SLURM / "accelerate.sbatch", GPT, *SMALL, "--steps", 20, "--nan-rank", 1, "--nan-step", 5)
    wait_for(lambda: is_over(slurm, number), 120, f"the halt; {slurm.printed(number)[-3000:]}")
    job = slurm.job(number)
    assert ("SPECIAL_EXIT", "JobHeldUser", "93:0") == (
        job["JobState"],
        job["Reason"],
        job["ExitCode"],
    ), job
    assert "Non-finite input (nonfinite_input) on rank 1" in slurm.printed(number)
    kept = run_dir(slurm, number) / "checkpoints" / "5" / "manifest.json"
    assert kept.exists()

    slurm.run("scontrol", "release", number)
    wait_for(lambda: slurm.printed(number).count("not started again blindly") >= 2, 60, "the refusal")
    wait_for(lambda: is_over(slurm, number), 60, "the second hold")
    assert "SPECIAL_EXIT" == slurm.job(number)["JobState"]
    slurm.run("scancel", number)

    assert "doctor ended with 0" in (slurm.home / "doctor.log").read_text()
    wait_for(lambda: list((slurm.home / "archive").glob(f"{number}.*.tar.gz")), 30, "the epilog")
    with tarfile.open(min((slurm.home / "archive").glob(f"{number}.*.tar.gz"))) as archive:
        names = archive.getnames()
    assert f"holter-runs/slurm-{number}/halt.json" in names
    assert not [name for name in names if "checkpoints" in name or "coordinator.json" in name]


def test_a_crash_is_requeued_but_not_for_ever(slurm, tmp_path):
    script = tmp_path / "crashes.py"
    script.write_text("raise SystemExit(7)\n")
    number = slurm.submit("--export=ALL,HOLTER_CRASHES=1", SLURM / "torchrun.sbatch", script)
    wait_for(lambda: is_over(slurm, number), 120, "the second life")
    job = slurm.job(number)
    assert ("FAILED", "1", "1:0") == (job["JobState"], job["Restarts"], job["ExitCode"]), slurm.printed(number)[-3000:]
    assert (run_dir(slurm, number) / "crashes").read_text() == "1\n1\n"


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["limit", "signal"])
def test_a_time_limit_leaves_a_checkpoint_from_which_the_job_goes_on_to_the_same_bits(slurm, tmp_path, how):
    script, pace = tmp_path / "paced.py", "0.2" if how == "limit" else "0.1"
    script.write_text(PACED)
    steps = (*SMALL, "--steps", 300 if how == "limit" else 100, "--save")
    limit = ["--time=1", "--signal=B:USR1@20"] if how == "limit" else []
    batch = SLURM / ("accelerate.sbatch" if how == "limit" else "torchrun.sbatch")
    number = slurm.submit(f"--export=ALL,PACE_S={pace}", *limit, batch, script, GPT, *steps, tmp_path / "resumed")
    if how == "signal":
        wait_for(lambda: "step  20" in slurm.printed(number), 120, f"step 20; {slurm.printed(number)[-3000:]}")
        slurm.run("scancel", "--batch", "--signal=USR1", number)
    # A life of a minute may see no more than fifty steps where others use the machine too.
    wait_for(lambda: is_over(slurm, number), 600, f"the last life; {slurm.printed(number)[-3000:]}")
    job, said = slurm.job(number), slurm.printed(number)
    assert "COMPLETED" == job["JobState"], said[-4000:]
    assert int(job["Restarts"]) >= 1
    assert f"time limit of Slurm job {number}" in said
    assert "resumed after" in said

    one = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        GPT,
        *steps,
        tmp_path / "never",
    ]
    subprocess.run([str(word) for word in one], env=slurm.environ, check=True, timeout=200, capture_output=True)
    same = [sys.executable, ROOT / "deploy" / "examples" / "same_bits.py", tmp_path / "never", tmp_path / "resumed"]
    told = subprocess.run(same, capture_output=True, text=True, check=False)
    assert "bit for bit the same" in told.stdout, told.stdout
