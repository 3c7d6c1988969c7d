"""How a process ended, read by somebody who is not its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from holter.sidecar.process import Ending, Process, started_ticks


def wait_for(is_there: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)


def let_go(process: subprocess.Popen[bytes]) -> None:
    process.stdin.close()


ENDINGS = [
    ("import sys; sys.stdin.read(); sys.exit(0)", Ending(0, None)),
    ("import sys; sys.stdin.read(); sys.exit(93)", Ending(93, None)),
    ("import sys, os; sys.stdin.read(); os.kill(os.getpid(), 9)", Ending(None, signal.SIGKILL)),
    ("import sys, os; sys.stdin.read(); os.abort()", Ending(None, signal.SIGABRT)),
]


@pytest.mark.parametrize(("code", "ending"), ENDINGS)
def test_the_ending_of_a_child_that_nobody_has_reaped(code, ending):
    process = child(code)
    watched = Process(process.pid, started_ticks(process.pid))
    assert watched.ending() is None
    let_go(process)
    wait_for(watched.ending)
    assert ending == watched.ending()
    process.wait()
    os.close(watched.pidfd)


@pytest.mark.parametrize(("code", "ending"), ENDINGS)
def test_the_ending_of_a_child_that_was_reaped_is_right_or_unknown(code, ending):
    process = child(code)
    watched = Process(process.pid, started_ticks(process.pid))
    let_go(process)
    process.wait()
    # Only a kernel of 6.15 or newer still knows.
    assert watched.ending() in (ending, None)
    os.close(watched.pidfd)


def test_another_process_under_the_same_number_is_not_taken_for_it():
    stranger = Process(os.getpid(), started_ticks(os.getpid()) + 1)
    assert (-1, None) == (stranger.pidfd, stranger.ending())


def test_a_process_that_is_gone_is_known_to_be():
    process = child("pass")
    process.communicate()
    gone = Process(process.pid, 0)
    assert (-1, None) == (gone.pidfd, gone.ending())


def test_a_name_with_spaces_and_parentheses_is_read_through(tmp_path):
    script = tmp_path / "a) b (c"
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o755)
    process = subprocess.Popen([str(script)], stdin=subprocess.PIPE)
    assert started_ticks(process.pid) >= started_ticks(os.getpid())
    process.communicate(b"\n")


def test_nobody_was_out_of_memory():
    watched = Process(os.getpid(), 0)
    assert not watched.was_out_of_memory()
    os.close(watched.pidfd)
