"""Each check of the machine against something that breaks it."""

import contextlib
import resource
import shutil
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from holter.cli import main
from holter.offline.preflight import machine
from holter.offline.preflight.machine import MachineNeeds


def outcomes(**needs) -> dict[str, str]:
    return {one.check: one.outcome for one in machine.look(MachineNeeds(**needs))}


def test_a_machine_that_runs_these_tests_is_well(tmp_path):
    found = outcomes(runs=tmp_path)
    assert "failed" not in found.values(), found
    assert {
        "python",
        "torch",
        "kernels",
        "stacks",
        "descriptors",
        "shared memory",
        "disk",
        "ports",
        "clock",
        "compiler",
    } == set(found)


def test_a_port_that_somebody_has(tmp_path):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert "failed" == outcomes(runs=tmp_path, ports=(("HOLTER_PORT", port),))["ports"]
    assert "ok" == outcomes(runs=tmp_path, ports=(("HOLTER_PORT", port),))["ports"]


@pytest.mark.parametrize(("scope", "expected"), [("0", "ok"), ("1", "ok"), ("3", "failed")])
def test_a_kernel_that_lets_nobody_look(scope, expected, tmp_path):
    (tmp_path / "scope").write_text(scope)
    assert expected == outcomes(runs=tmp_path, yama=tmp_path / "scope")["stacks"]


def test_a_py_spy_that_may_not_or_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "py-spy").write_text("#!/bin/sh\necho 'Permission Denied' >&2\nexit 1\n")
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (found,) = [one for one in machine.look(MachineNeeds(runs=tmp_path)) if one.check == "stacks"]
    assert ("failed", True) == (found.outcome, "Permission Denied" in found.says)
    (tmp_path / "py-spy").unlink()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "failed" == outcomes(runs=tmp_path)["stacks"]


def test_too_few_descriptors(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert "warning" == outcomes(runs=tmp_path)["descriptors"]
        assert "failed" == outcomes(runs=tmp_path, local_ranks=1 << 40)["descriptors"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_disk_or_shared_memory_that_is_full_or_cannot_be_written(tmp_path, monkeypatch):
    assert "failed" == outcomes(runs=Path("/proc/nowhere"))["disk"]
    assert "failed" == outcomes(runs=tmp_path, shared_memory=tmp_path / "none")["shared memory"]
    usage = shutil.disk_usage(tmp_path)
    for free, disk, shared in (
        (10 << 20, "failed", "failed"),
        (64 << 20, "failed", "warning"),
        (1 << 30, "warning", "ok"),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        found = outcomes(runs=tmp_path)
        assert (disk, shared) == (found["disk"], found["shared memory"])


def test_a_directory_of_a_halted_run(tmp_path):
    (tmp_path / "halt.json").write_text("{}")
    assert "failed" == outcomes(runs=tmp_path, run_dir=tmp_path)["run directory"]


class LateClock(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response_only(200)
        self.send_header("Date", "Wed, 18 Nov 2020 10:00:00 GMT")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_coordinator_that_is_not_there_or_whose_clock_is_far(tmp_path):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    assert "failed" == outcomes(runs=tmp_path, coordinator=f"127.0.0.1:{port}")["coordinator"]
    server = HTTPServer(("127.0.0.1", 0), LateClock)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert "warning" == outcomes(runs=tmp_path, coordinator=f"127.0.0.1:{server.server_port}")["clock"]
    finally:
        server.shutdown()
        server.server_close()


def test_the_command_ends_with_one_where_something_will_not_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("if rank == 0:\n    dist.barrier()\n")
    assert 1 == main(["doctor", "--script", "train.py"])
    said = capsys.readouterr().out
    assert "FAILED   barrier under a rank condition train.py: line 2" in said
    assert "WILL NOT WORK: barrier under a rank condition" in said
    monkeypatch.setenv("HOLTER_PORT", "nonsense")
    assert 1 == main(["doctor", "--json"])
    assert '"is_healthy": false' in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--script", "nowhere.py"],
        ["nowhere.yaml"],
        ["--launch"],
        ["--", "torchrun"],
        ["--only", "kernels"],
        ["--launch", "--", "no-such-program"],
    ],
)
def test_wrong_use_is_one_sentence(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert 2 == main(["doctor", *words])
    assert 1 == capsys.readouterr().err.count("\n")
