"""What is said in a stopped process's own log."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from holter.sidecar.state import say_in_job_log

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "pipe"])
def test_a_stopped_process_has_it_in_its_log(tmp_path, is_file):
    log = tmp_path / "log"
    log.write_text("before\n")
    read_end, write_end = os.pipe()
    with log.open("ab") as file:
        process = subprocess.Popen(SLEEPER, stderr=file if is_file else write_end)
    os.close(write_end)
    try:
        process.send_signal(signal.SIGSTOP)
        assert say_in_job_log(process.pid, "rank 1 stands still")
    finally:
        process.kill()
        process.wait()
    if is_file:
        assert log.read_text() == "before\nholter: rank 1 stands still\n"
    else:
        # The pipe ends with the process: nothing of ours holds it open.
        assert os.read(read_end, 4096) == b"holter: rank 1 stands still\n"
        assert os.read(read_end, 4096) == b""
    os.close(read_end)


def test_a_full_pipe_and_a_dead_process_are_not_waited_for():
    read_end, write_end = os.pipe()
    process = subprocess.Popen(SLEEPER, stderr=write_end)
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(write_end, b"x" * 4096):
            pass
    assert not say_in_job_log(process.pid, "nobody reads")
    process.kill()
    process.wait()
    assert not say_in_job_log(process.pid, "nobody is there")
    os.close(read_end)
    os.close(write_end)


def test_what_a_process_writes_afterwards_does_not_overwrite_it(tmp_path):
    log = tmp_path / "log"
    script = (
        "import sys\nprint('one', file=sys.stderr, flush=True)\ninput()\nprint('two', file=sys.stderr, flush=True)\n"
    )
    with log.open(
        "wb"
    ) as file:  # As `2> log` does: every writer of this description goes on where the last one stopped.
        process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=file)
    try:
        for _ in range(1000):
            if log.read_text():
                break
            time.sleep(0.01)
        assert say_in_job_log(process.pid, "rank 1 stands still")
        process.communicate(b"\n", timeout=30)
    finally:
        process.kill()
        process.wait()
    assert log.read_text() == "one\nholter: rank 1 stands still\ntwo\n"
