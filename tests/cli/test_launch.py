"""`holter launch` and `holter resume`: the halt has the last word."""

import json
import signal
import subprocess
import sys
import time

import pytest

from holter.cli import main
from holter.halting import halt_record
from holter.halting.vault import store
from made_up import HALT

HALTS = "import os, pathlib; d = pathlib.Path(os.environ['HOLTER_RUN_DIR']); d.mkdir(exist_ok=True); (d / 'halt.json').write_text('{}')"


@pytest.fixture
def halted(tmp_path):
    (tmp_path / "run.json").write_text(
        json.dumps({"run_id": "r", "command": ["train.py", "--lr", "1"]}), encoding="utf-8"
    )
    halt_record.write(tmp_path, HALT)
    return tmp_path


def launch(run_dir, *command):
    return main(["launch", "--run-dir", str(run_dir), "--", *command])


def test_a_command_keeps_its_own_exit_code(tmp_path):
    assert launch(tmp_path / "run", "sh", "-c", "exit 5") == 5
    assert launch(tmp_path / "run", "true") == 0


def test_the_command_is_watched_and_knows_its_directory(tmp_path):
    assert launch(tmp_path / "run", "sh", "-c", f'test "$HOLTER" = 1 && test "$HOLTER_RUN_DIR" = {tmp_path}/run') == 0


def test_a_halt_is_passed_on_as_93_whatever_the_launcher_made_of_it_and_has_the_last_word(tmp_path, capsys):
    assert launch(tmp_path / "run", sys.executable, "-c", HALTS + "; raise SystemExit(1)") == 93
    said = capsys.readouterr().err
    assert "is a halt" in said
    assert f"holter resume {tmp_path / 'run'}" in said.splitlines()[-2]


def test_a_halted_run_is_not_begun_again(halted, capsys):
    assert launch(halted, "touch", str(halted / "began")) == 93
    assert not (halted / "began").exists()
    assert "holter resume" in capsys.readouterr().err


def test_resume_on_the_command_line_lifts_it(halted):
    assert main(["launch", "--run-dir", str(halted), "--resume", "--", "true"]) == 0
    assert halt_record.read(halted) is None


@pytest.mark.parametrize("told", ["--resume", "HOLTER_RESUME"])
def test_the_job_itself_is_not_told_to_resume_or_its_restart_would_lift_the_next_halt(halted, monkeypatch, told):
    if told == "HOLTER_RESUME":
        monkeypatch.setenv(told, "1")
    option = ["--resume"] if told == "--resume" else []
    script = "import os; raise SystemExit('HOLTER_RESUME' in os.environ)"
    assert main(["launch", "--run-dir", str(halted), *option, "--", sys.executable, "-c", script]) == 0


def test_a_batch_script_that_is_queued_again_lifts_nothing(halted, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("HOLTER_RESUME", "1")
    assert main(["launch", "--run-dir", str(halted), "--resume", "--", "touch", str(halted / "began")]) == 93
    assert not (halted / "began").exists()
    assert halt_record.read(halted) == HALT
    said = capsys.readouterr().err
    assert f"holter resume {halted} (in a restart nothing else lifts it)" in said.replace("`", "")


def test_wrong_use_is_said_in_a_sentence(capsys):
    assert main(["launch", "--"]) == 2
    assert "name the job's own command" in capsys.readouterr().err
    assert main(["launch", "--action", "panic", "--", "true"]) == 2
    assert "--action" in capsys.readouterr().err


def test_a_launcher_that_is_not_there_is_said(capsys, tmp_path):
    assert launch(tmp_path / "run", "there-is-no-such-launcher") == 127
    assert "there-is-no-such-launcher" in capsys.readouterr().err


def test_a_signal_reaches_the_launcher(tmp_path):
    script = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: exit(7)); print('up', flush=True); time.sleep(60)"
    command = [
        sys.executable,
        "-m",
        "holter.cli",
        "launch",
        "--run-dir",
        str(tmp_path / "run"),
        "--",
        sys.executable,
        "-c",
        script,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 7


def test_a_launcher_that_starts_the_job_again_all_the_same_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("holter.cli.launch.GRACE_S", 0.5)
    began = time.monotonic()
    assert launch(tmp_path / "run", sys.executable, "-c", HALTS + "; import time; time.sleep(120)") == 93
    assert time.monotonic() - began < 60


def test_resume_lifts_the_halt_and_says_from_where(halted, capsys):
    assert main(["resume", str(halted)]) == 0
    said = capsys.readouterr().out
    assert f"accelerator.load_state('{halted}/checkpoints/30/state')" in said
    assert "train.py --lr 1" in said
    assert main(["resume", str(halted)]) == 2
    assert "does not stand halted" in capsys.readouterr().err


def test_resume_of_a_run_that_was_not_halted_offers_the_last_healthy_checkpoint(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"run_id": "r"}')
    kept = {"framework": "torch", "saved_at": "2026-11-15T10:15:00Z", "seconds": 0.1, "ranks": [0]}
    saves = [
        {"step": 60, "path": "out/60.pt", "verdict": "healthy", "why": "", **kept},
        {"step": 80, "path": "out/80.pt", "verdict": "suspect", "why": "the loss had left its course", **kept},
    ]
    path = store.script_saves_path(tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps({"saves": saves}))
    assert main(["resume", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert (
        "of step 80, is suspect (the loss had left its course); the last healthy one is of step 60: out/60.pt" in said
    )


def test_resume_as_json(halted, capsys):
    assert main(["resume", str(halted), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == f"{halted}/checkpoints/30/state"


def test_resume_with_a_command_runs_it_from_the_checkpoint(halted):
    script = f'test "$HOLTER_RESUME_FROM" = {halted}/checkpoints/30/state'
    assert main(["resume", str(halted), "--", "sh", "-c", script]) == 0
    halt_record.write(halted, HALT)
    assert main(["resume", str(halted), "--", "sh", "-c", "exit 4"]) == 4
