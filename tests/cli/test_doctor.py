"""`holter doctor --gpu`: one line a check, and a device that hangs or a process that dies is a failed check, not the end of the report."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holter import cli
from holter.cli import doctor
from holter.rank.doctor import plan

STAND_IN = """
import json, os, signal, sys, time
def tell(**what): print(json.dumps(what), flush=True)
tell(devices=["a GPU"], torch="2", why_none="")
for name in sys.argv[1:]:
    tell(began=name)
    tell(progress="half of it")
    if name == "kernels":
        time.sleep(600)
    if name == "waiting":
        sys.stderr.write("illegal memory access\\n"); sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = {"memory": "failed", "compile": "skipped"}.get(name, "ok")
    tell(check=name, outcome=outcome, says="so it is", seconds=0.1, numbers={"n": 1}, details=["line"] * (outcome == "failed"))
    if outcome == "failed":
        break
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A process of checks that hangs, dies and fails at some of them."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys\ndel sys.argv[1:3]\n{STAND_IN}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.usefixtures("stand_in")
def test_a_hang_a_death_and_a_failure_are_lines_and_the_others_are_still_checked(monkeypatch, capsys):
    find = plan.find
    monkeypatch.setattr(
        plan,
        "find",
        lambda name: type("Check", (), {"name": name, "deadline_s": 2.0}) if name == "kernels" else find(name),
    )
    assert 1 == cli.main(["doctor", "--gpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    outcomes = {check["check"]: check["outcome"] for check in found["checks"]}
    assert list(plan.NAMES) == list(outcomes)
    assert {"kernels", "waiting", "memory"} == {name for name, outcome in outcomes.items() if outcome == "failed"}
    says = {check["check"]: check["says"] for check in found["checks"]}
    assert "no answer within 2 s" in says["kernels"]
    assert "SIGKILL: illegal memory access" in says["waiting"]
    assert (False, ["a GPU"]) == (found["is_healthy"], found["devices"])


@pytest.mark.usefixtures("stand_in")
def test_the_last_line_says_whether_all_is_well(capsys):
    names = ["environment", "compile", "nan"]
    assert 0 == cli.main(["doctor", "--gpu", *(word for name in names for word in ("--only", name))])
    lines = capsys.readouterr().out.splitlines()
    assert "cuda:0 is a GPU" == lines[1]
    assert lines[-1].startswith("well (2 ok, 0 failed, 1 skipped in ")
    assert 1 == cli.main(["doctor", "--gpu", "--only", "memory"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("NOT WELL: memory (0 ok, 1 failed")
    assert "FAILED  memory" in lines[-3]
    assert 1 == cli.main(["doctor", "--gpu", "--only", "compile"])
    assert "nothing could be checked" in capsys.readouterr().out


def test_without_a_device_one_sentence_and_no_health(capsys):
    assert 1 == cli.main(["doctor", "--gpu"])
    said = capsys.readouterr()
    assert "" == said.out
    assert said.err.startswith("holter: there is no GPU to check: torch ")
    assert 1 == said.err.count("\n")
    assert 1 == cli.main(["doctor", "--gpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (False, [], []) == (found["is_healthy"], found["devices"], found["checks"])


@pytest.mark.parametrize("words", [["--gpu", "--only", "nothing"], ["--cpu"]])
def test_wrong_use_is_one_sentence(words, capsys):
    assert 2 == cli.main(["doctor", *words])
    said = capsys.readouterr()
    assert ("", 1) == (said.out, said.err.count("\n"))


def test_help_names_every_check(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in plan.NAMES)


def test_a_python_without_torch_is_said(tmp_path, monkeypatch, capsys):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert 1 == cli.main(["doctor", "--gpu"])
    assert "with exit code 1: ModuleNotFoundError: No module named 'torch'" in capsys.readouterr().err


def test_it_runs_on_the_device_of_the_tests(device_environment, monkeypatch, capsys):
    for name, value in device_environment.items():
        monkeypatch.setenv(name, value)
    assert 0 == cli.main(["doctor", "--gpu", "--only", "environment", "--only", "kernels", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert 2 == len(found["devices"])
    assert ["ok", "skipped"] == [check["outcome"] for check in found["checks"]]


@pytest.mark.usefixtures("stand_in")
def test_what_hangs_is_ended():
    with doctor._Child(["kernels"]) as child:
        assert child.next(10, "") is not None
        assert child.next(1, "") is None
        pid = child._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_ended_by_a_signal_it_leaves_no_process(number, tmp_path):
    script = tmp_path / "python"
    told = tmp_path / "pids"
    script.write_text(
        f"#!{sys.executable}\nimport os, subprocess, sys\nfrom pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"Path({str(told)!r}).write_text(str(os.getpid()) + ' ' + str(child.pid) + chr(10))\n"
        f"sys.argv[1:] = ['kernels']\n{STAND_IN}"
    )
    script.chmod(0o755)
    program = f"import sys; sys.executable = {str(script)!r}; from holter.cli import main; sys.exit(main(['doctor', '--gpu']))"
    doctors = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    began = time.monotonic()
    while not (told.exists() and told.read_text().endswith("\n")):
        assert time.monotonic() < began + 60
        time.sleep(0.05)
    doctors.send_signal(number)
    doctors.communicate(timeout=60)
    assert doctors.returncode != 0
    for pid in map(int, told.read_text().split()):
        while is_alive(pid):
            assert time.monotonic() < began + 120
            time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
