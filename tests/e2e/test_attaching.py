"""Every way on, and scripts that are no training jobs."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.free_port import free_port

SCRIPTS = Path(__file__).parent / "scripts"
FAULTS = Path(__file__).parents[1] / "corpus" / "scripts"
EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "train_gpt.py"
pytestmark = pytest.mark.job


def run_json(ended) -> dict:
    return json.loads((ended.run_dir / "run.json").read_text())


def test_an_unmodified_command_is_attached_by_the_environment(jobs):
    ended = jobs.run(FAULTS / "nan_in_batch.py", attached=False, env={"HOLTER": "1"})
    assert ended.top["cause"] == "nonfinite_input"
    assert ended.top["ranks"] == [1]


@pytest.mark.release
def test_without_the_environment_nothing_is_attached(jobs):
    ended = jobs.run(FAULTS / "nan_in_batch.py", attached=False)
    assert ended.code == 0
    assert not ended.run_dir.exists()
    assert ended.holter_lines == []


def test_accelerate_launch_of_the_example(jobs):
    ended = jobs.run(EXAMPLE, "--steps", 20, "--nan-rank", 1, "--nan-step", 12, by="accelerate")
    assert ended.top["cause"] == "nonfinite_input"
    assert ended.top["ranks"] == [1]
    assert ended.top["tensors"] == ["noise"]
    assert run_json(ended)["world_size"] == 2


@pytest.mark.release
def test_a_single_process_without_a_launcher(jobs):
    ended = jobs.run(SCRIPTS / "odd.py", "no_group", by="python")
    assert ended.code == 0
    assert ended.stdout == "done\n"
    assert ended.diagnoses == []
    assert run_json(ended)["world_size"] == 1


@pytest.mark.parametrize(
    ("how", "by"), [("accelerator", "accelerate"), pytest.param("model", "python", marks=pytest.mark.release)]
)
def test_watch(jobs, how, by):
    ended = jobs.run(SCRIPTS / "watch_loop.py", how, by=by, attached=False)
    assert ended.code == 0, ended.stderr[-2000:]
    assert sum("watching" in line for line in ended.holter_lines) == 1
    assert ended.diagnoses == []


def test_the_callback_of_the_trainer(jobs):
    ended = jobs.run(SCRIPTS / "trainer.py", by="accelerate", attached=False)
    assert ended.code == 0, ended.stderr[-2000:]
    assert run_json(ended)["world_size"] == 2
    assert ended.diagnoses == []


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("crash", 1),
        *(
            pytest.param(*odd, marks=pytest.mark.release)
            for odd in (("never_steps", 0), ("no_torch", 0), ("exit", 5), ("pickle", 0))
        ),
    ],
)
def test_an_odd_script_behaves_as_without_holter(jobs, kind, code):
    bare = jobs.run(SCRIPTS / "odd.py", kind, by="python", attached=False)
    worn = jobs.run(SCRIPTS / "odd.py", kind, by="python")
    assert bare.code == worn.code == code
    assert bare.stdout == worn.stdout
    assert len(worn.holter_lines) <= 1
    if kind == "crash":
        own = [line for line in worn.stderr.splitlines() if line not in worn.holter_lines]
        assert bare.stderr.splitlines() == own


@pytest.mark.release
def test_two_ranks_that_make_no_group_behave_as_without_holter(forks):
    ended = forks.run(SCRIPTS / "odd.py", "no_group")
    assert ended.code == 0
    assert ended.stdout == "done\ndone\n"
    assert ended.diagnoses == []


def test_ctrl_c_behaves_as_without_holter(jobs):
    job = jobs.start(SCRIPTS / "odd.py", "forever", by="python")
    assert job.process.stdout.readline() == "ready\n"
    os.kill(job.process.pid, signal.SIGINT)
    ended = job.wait()
    assert ended.code == -signal.SIGINT
    assert "KeyboardInterrupt" in ended.stderr
    assert ended.diagnoses == []


@pytest.mark.release
def test_two_jobs_on_one_machine_do_not_meet(forks):
    first = forks.start(FAULTS / "nan_in_batch.py", "--steps", 300)
    second = forks.start(FAULTS / "nan_in_batch.py", "--healthy", "--steps", 300)
    first, second = first.wait(), second.wait()
    assert first.top["cause"] == "nonfinite_input"
    assert second.code == 0
    assert second.diagnoses == []


def test_a_job_reports_to_a_coordinator_that_already_runs(forks, tmp_path, wait_for):
    token, run_dir = tmp_path / "token", tmp_path / "central"
    token.write_text("a secret of this test\n")
    port = free_port()
    command = [sys.executable, "-m", "holter.cli", "coordinator", "--run-dir", run_dir, "--port", str(port)]
    hasty = os.environ | {"HOLTER_LINGER_S": "0"}
    coordinator = subprocess.Popen([*command, "--token-file", token], stderr=subprocess.PIPE, env=hasty)
    try:
        wait_for((run_dir / "coordinator.json").exists, 30, "the coordinator")
        env = {"HOLTER_COORDINATOR": f"127.0.0.1:{port}", "HOLTER_TOKEN_FILE": str(token)}
        ended = forks.run(FAULTS / "nan_in_batch.py", env=env)
        assert ended.code == 0
        coordinator.wait(timeout=60)
    finally:
        coordinator.kill()
        coordinator.communicate()
    ended.run_dir = run_dir
    assert ended.top["cause"] == "nonfinite_input"
    assert ended.top["ranks"] == [1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--overhead-budget", "fast", "x.py"], "--overhead-budget must be a number, got 'fast'"),
        (["--no-such-option", "1", "x.py"], "there is no option --no-such-option"),
        (["missing.py"], "there is no script missing.py"),
        ([], "name a script"),
    ],
)
def test_wrong_use_is_one_clear_sentence(tmp_path, arguments, sentence):
    ended = subprocess.run(
        [sys.executable, "-m", "holter", *arguments], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "Traceback" not in ended.stderr


@pytest.mark.release
def test_a_taken_port_is_said_and_a_free_one_taken(forks):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = forks.run(FAULTS / "nan_in_batch.py", "--healthy", options=["--port", str(port)])
    assert ended.code == 0
    assert any(f"port {port}" in line for line in ended.holter_lines)
    assert run_json(ended)["world_size"] == 2
