"""How a process ended, read by somebody who is not its parent."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holter.sidecar.process import Process, ProcessEnding, started_ticks


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
    ("import sys; sys.stdin.read(); sys.exit(0)", ProcessEnding(0, None)),
    ("import sys; sys.stdin.read(); sys.exit(93)", ProcessEnding(93, None)),
    ("import sys, os; sys.stdin.read(); os.kill(os.getpid(), 9)", ProcessEnding(None, signal.SIGKILL)),
    ("import sys, os; sys.stdin.read(); os.abort()", ProcessEnding(None, signal.SIGABRT)),
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


SPIN = "while True: pass"
REST = "import time; time.sleep(100)"


@pytest.fixture
def watch() -> Iterator[Callable[[str], tuple[subprocess.Popen[bytes], Process]]]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> tuple[subprocess.Popen[bytes], Process]:
        started.append(child(code))
        return started[-1], Process(started[-1].pid, started_ticks(started[-1].pid))

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_that_computes_uses_a_processor_and_one_that_rests_does_not(watch):
    (_, spinning), (_, resting) = watch(SPIN), watch(REST)
    first, quiet = spinning.look(0.0), resting.look(0.0)
    assert math.isnan(first.cpu_share)
    wait_for(lambda: Process(spinning.pid, 0).look(0.0).cpu_s > first.cpu_s + 0.5)
    # A second by our own account, however long it took on a noisy machine.
    again, still = spinning.look(1.0), resting.look(1.0)
    assert "running" == again.state
    assert again.cpu_share > 0.4
    assert still.cpu_s - quiet.cpu_s < 0.4
    assert set(again.pressure) <= {"cpu", "memory", "io"}
    assert all(0 <= share <= 1 for share in again.pressure.values())


def test_the_share_of_a_processor_is_taken_over_a_second(watch):
    _, watched = watch(REST)
    watched._cpu.extend([(0.0, 1.0), (0.5, 2.0), (1.0, 3.0)])
    assert pytest.approx(2.0) == watched._share(1.5, 4.0)
    assert pytest.approx(0.0) == watched._share(2.0, 3.0)


def test_a_stopped_process_is_stopped_for_as_long_as_it_is(watch):
    process, watched = watch(REST)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: "stopped" == watched.look(10.0).state)
    assert 0.0 == watched.look(10.0).stopped_s
    assert 2.5 == watched.look(12.5).stopped_s
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: "sleeping" == watched.look(13.0).state)
    assert 0.0 == watched.look(13.0).stopped_s
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: "stopped" == watched.look(20.0).state)
    assert 1.0 == watched.look(21.0).stopped_s


def test_a_sleeping_process_says_where_it_sleeps(watch):
    _, watched = watch(REST)

    def is_asleep() -> bool:
        # On its way there it sleeps elsewhere, too; and some kernels do not tell where.
        seen = watched.look(0.0)
        return "sleeping" == seen.state and ("nanosleep" in seen.wait_channel or not seen.wait_channel)

    wait_for(is_asleep)


FREEZERS = [
    (Path("/sys/fs/cgroup/unified"), "cgroup.freeze", "1", "0"),
    (Path("/sys/fs/cgroup"), "cgroup.freeze", "1", "0"),
    (Path("/sys/fs/cgroup/freezer"), "freezer.state", "FROZEN", "THAWED"),
]


@pytest.mark.parametrize(("root", "file", "on", "off"), FREEZERS, ids=["beside version 1", "version 2", "version 1"])
def test_a_frozen_process_is_frozen_not_asleep(watch, root, file, on, off):
    group = root / f"holter-test-{os.getpid()}"
    process, watched = watch(REST)
    if not (root / "cgroup.procs").exists():
        pytest.skip("this machine has it elsewhere")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control group can be made here")
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        wait_for(lambda: "sleeping" == watched.look(0.0).state)
        (group / file).write_text(on)
        wait_for(lambda: "frozen" == watched.look(1.0).state)
        assert 2.0 == watched.look(3.0).stopped_s
        (group / file).write_text(off)
        wait_for(lambda: "sleeping" == watched.look(4.0).state)
    finally:
        process.kill()
        process.communicate()
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_a_process_that_ended_is_a_zombie_and_then_gone(watch):
    process, watched = watch(SPIN)
    wait_for(lambda: watched.look(0.0).cpu_s > 0.05)
    process.kill()
    wait_for(lambda: "zombie" == watched.look(1.0).state)
    process.communicate()
    gone = watched.look(2.0)
    assert "gone" == gone.state
    assert gone.cpu_s > 0


def test_a_look_is_cheap(watch):
    _, watched = watch(REST)
    began = time.perf_counter()
    for turn in range(200):
        watched.look(float(turn))
    # Some tens of microseconds; the bound is for the noisiest of machines.
    assert (time.perf_counter() - began) / 200 < 0.005
