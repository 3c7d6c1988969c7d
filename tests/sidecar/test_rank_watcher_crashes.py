"""A crashing process tells, waits for the answer, and dies as it would have died."""

import asyncio
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from holter.sidecar.rank_watcher import CrashingRank, CrashListener

pytest.importorskip("holter.rank._crash_notice")

CRASHES = """
import ctypes, faulthandler, os, signal, sys, threading, time
how, faults, descriptor = sys.argv[1], sys.argv[2], int(sys.argv[3])
if faults == "before":
    faulthandler.enable()
if descriptor >= 0:
    from holter.rank import _crash_notice
    _crash_notice.install(descriptor)
if faults == "after":
    faulthandler.enable()
if how == "handled":
    signal.signal(signal.SIGABRT, lambda *_: None)
    if descriptor >= 0:
        _crash_notice.install(descriptor)
print("now", time.monotonic(), flush=True)
if how == "abort":
    os.abort()
elif how == "fault":
    ctypes.string_at(0)
elif how == "sent":
    os.kill(os.getpid(), signal.SIGBUS)
elif how == "thread":
    threading.Timer(0.5, os.abort).start()  # the main thread is asleep by then, with and without us
    time.sleep(60)
elif how == "child":
    pid = os.fork()
    if pid == 0:
        os.abort()
    sys.exit(os.WTERMSIG(os.waitpid(pid, 0)[1]))
elif how == "handled":
    os.kill(os.getpid(), signal.SIGABRT)
    os.kill(os.getpid(), signal.SIGABRT)
    sys.exit(9)
"""
DIES_OF = {"abort": signal.SIGABRT, "fault": signal.SIGSEGV, "sent": signal.SIGBUS, "thread": signal.SIGABRT}


class Crash:
    """A process under way, and our end of its socket."""

    def __init__(self, how: str, faults: str = "never", *, worn: bool = True) -> None:
        self.ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", CRASHES, how, faults, str(theirs.fileno() if worn else -1)]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        theirs.close()

    def end(self) -> tuple[int, str, float]:
        """Exit code, standard error, and seconds from the crash to the end."""
        word, began = self.process.stdout.readline().split()
        assert "now" == word
        _, said = self.process.communicate(timeout=60)
        self.ours.close()
        return self.process.returncode, said, time.monotonic() - float(began)


@pytest.mark.parametrize("how", DIES_OF)
@pytest.mark.parametrize("faults", ["never", "before", "after"])
async def test_it_dies_as_without_us(how, faults):
    bare_code, bare_said, _ = Crash(how, faults, worn=False).end()
    crash = Crash(how, faults)
    listener = CrashListener(crash.ours.detach())
    heard: asyncio.Queue[CrashingRank] = asyncio.Queue()
    listener.listen(asyncio.get_running_loop(), heard.put_nowait)
    dying = await asyncio.wait_for(heard.get(), 60)
    assert dying.signal == DIES_OF[how]
    assert (dying.thread == crash.process.pid) is (how != "thread")
    assert crash.process.poll() is None, "it waits for our answer"
    listener.acknowledge()
    code, said, _ = await asyncio.to_thread(crash.end)
    assert code == bare_code == -DIES_OF[how]
    assert _without_addresses(said) == _without_addresses(bare_said)
    assert ("Fatal Python error" in said) is (faults != "never")
    listener.close()


def _without_addresses(said: str) -> list[str]:
    """Nor the list of extension modules, of which ours is one."""
    varying = ("Thread 0x", "Current thread 0x", "Extension modules")
    return [line for line in said.splitlines() if line and not line.startswith(varying)]


def test_nobody_on_the_other_side_is_not_waited_for():
    ends = []
    for _ in range(3):
        crash = Crash("abort")
        crash.ours.close()
        ends.append(crash.end())
    assert {code for code, *_ in ends} == {-signal.SIGABRT}
    # With somebody who never answers each would take a second and a half.
    assert min(seconds for *_, seconds in ends) < 1.4


def test_one_who_never_answers_is_waited_for_a_second_and_a_half():
    code, _, seconds = Crash("abort").end()
    assert code == -signal.SIGABRT
    assert 1.4 < seconds < 20


def test_a_forked_child_dies_without_a_word():
    crash = Crash("child")
    assert crash.process.wait(timeout=60) == signal.SIGABRT
    crash.process.communicate()
    crash.ours.settimeout(10)
    assert b"" == crash.ours.recv(8), "the line ended without a word"
    crash.ours.close()


def test_a_handler_that_was_there_before_is_called_each_time():
    crash = Crash("handled")
    crash.ours.sendall(b"!")
    code, _, seconds = crash.end()
    assert code == 9
    assert seconds < 20


async def test_halves_of_a_word_are_put_together():
    ours, theirs = socket.socketpair()
    heard: asyncio.Queue[CrashingRank] = asyncio.Queue()
    listener = CrashListener(ours.detach())
    listener.listen(asyncio.get_running_loop(), heard.put_nowait)
    word = struct.pack("=ii", 6, 4711)
    theirs.sendall(word[:3])
    await asyncio.sleep(0.05)
    theirs.sendall(word[3:] + word)
    assert CrashingRank(6, 4711) == await asyncio.wait_for(heard.get(), 10)
    assert CrashingRank(6, 4711) == await asyncio.wait_for(heard.get(), 10)
    theirs.close()
    await asyncio.sleep(0.05)
    listener.acknowledge()
    listener.close()


async def test_a_descriptor_that_another_file_took_is_left_alone(tmp_path):
    code = """
import os, socket, sys
from holter.rank import _crash_notice
ours, theirs = socket.socketpair()
_crash_notice.install(ours.fileno())
number = ours.detach()
os.close(number)
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), number)
os.abort()
"""
    path = tmp_path / "results"
    ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code, path], timeout=60, check=False)
    assert ended.returncode == -signal.SIGABRT
    assert path.stat().st_size == 0
