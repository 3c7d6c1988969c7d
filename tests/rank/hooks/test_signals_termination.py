"""A SIGTERM is told first; whoever does not answer does not keep the process alive."""

import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("holter.rank._termination")

SCRIPT = """
import ctypes, os, signal, sys, time
from holter.rank.hooks.signals import Termination
how = sys.argv[1]
if how == "own before":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
if how == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
termination = Termination()
termination.install([signal.SIGTERM, signal.SIGUSR1])
if how not in ("own before", "ignored"):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
if how == "own after":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print("ready", flush=True)
if how == "locked":
    ctypes.PyDLL(None).sleep(60)
if how == "child":
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    os._exit(-os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
if how in ("dies", "blocked", "lives", "twice", "USR1"):
    (number,) = os.read(termination.descriptor, 1)
    print(signal.Signals(number).name, flush=True)
    if how == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    if how in ("dies", "blocked"):
        termination.die(number)
    if how == "lives":
        termination.grant(0)
        time.sleep(4)
        os._exit(5)
    if how == "twice":
        termination.grant(6)
        os.read(termination.descriptor, 1)
        print("again", flush=True)
        time.sleep(60)
    os._exit(6)
time.sleep(60)
"""


class Process:
    """Under way, and ready for a signal."""

    def __init__(self, how: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT, how], stdout=subprocess.PIPE, text=True)
        assert self.line() == "ready"

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def end(self) -> int:
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        return code


@pytest.mark.parametrize(
    ("how", "code"),
    [("dies", -signal.SIGTERM), ("blocked", -signal.SIGTERM), ("USR1", 6), ("own before", 7), ("own after", 7)],
)
def test_it_is_told_and_who_else_handles_it_counts(how, code):
    process = Process(how)
    number = signal.SIGUSR1 if how == "USR1" else signal.SIGTERM
    process.process.send_signal(number)
    if not how.startswith("own"):
        assert process.line() == number.name
    assert process.end() == code


def test_a_forked_child_dies_at_once():
    began = time.monotonic()
    assert Process("child").end() == signal.SIGTERM
    assert time.monotonic() - began < 50


@pytest.mark.slow
def test_one_that_is_ignored_stays_ignored():
    process = Process("ignored")
    process.process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.process.wait(timeout=4)
    process.process.kill()
    process.end()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["locked", "nobody"])
def test_without_an_answer_it_dies_of_the_signal_three_seconds_later(how):
    process = Process(how)
    began = time.monotonic()
    process.process.terminate()
    assert process.end() == -signal.SIGTERM
    assert 2.5 < time.monotonic() - began < 40


@pytest.mark.release
@pytest.mark.slow
def test_what_is_granted_is_granted():
    lives = Process("lives")
    lives.process.terminate()
    assert lives.end() == 5, "longer than it would have lived without an answer"
    twice = Process("twice")
    began = time.monotonic()
    os.kill(twice.process.pid, signal.SIGTERM)
    assert twice.line() == "SIGTERM"
    time.sleep(1)
    os.kill(twice.process.pid, signal.SIGTERM)
    assert twice.line() == "again"
    assert twice.end() == -signal.SIGTERM
    assert 5 < time.monotonic() - began < 50
