"""Signals that a script has blocked to wait for them stay the script's, whatever threads of ours there are."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from holter.threads import without_signals

SCRIPT = """
import os, signal, socket, sys, tempfile, threading, time
def halt_agent():
    from holter.rank.hold.commit_register import LocalRegister
    from holter.rank.hold.halt_agent import HaltAgent
    from holter.rank.hold.halts import AgentParts; from holter.rank.hold.halts import AgentSettings
    from holter.rank.hold.halts import Leaving
    global line
    ours, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parts = AgentParts(actions=None, register=LocalRegister, leaving=Leaving(lambda: None))
    HaltAgent(AgentSettings(rank=0, world_size=1), parts, ours).start()
def worker_server():
    from holter.rank.flight_server import FlightServer
    FlightServer().start()
    # Its first thread starts the others.
    while len(os.listdir("/proc/self/task")) < 3:
        time.sleep(0.01)
def flight_thread():
    from holter.rank.flight_thread import FlightThread
    FlightThread(os.path.join(tempfile.mkdtemp(), "python"), lambda: None)
def shard_peers():
    from holter.rank.hold.agreement import Tree
    from holter.rank.hold.peers import PeerAddress; from holter.rank.hold.peers import ShardPeers
    ShardPeers(PeerAddress(Tree(0, 2), "127.0.0.1", 0), store=threading.Event().wait).agree(0, None)
for start in sys.argv[1:]:
    globals()[start]()
assert not signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
print(signal.sigwait({signal.SIGUSR1}).name, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("start", ["halt_agent", "worker_server", "flight_thread", "shard_peers"])
def test_a_signal_that_the_script_waits_for_reaches_it(start):
    command = [sys.executable, "-c", SCRIPT, start]
    # Numpy's own threads take signals, too.
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert (0, "SIGUSR1\n") == (ended.returncode, ended.stdout), ended.stderr


def test_only_the_new_thread_is_without_signals_and_its_own_faults_are_handled():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    found = []
    with without_signals():
        thread = threading.Thread(target=lambda: found.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        thread.start()
    assert before == signal.pthread_sigmask(signal.SIG_BLOCK, ())
    thread.join()
    assert {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGRTMIN} <= found[0]
    assert not {signal.SIGSEGV, signal.SIGBUS} & found[0]


def test_a_handler_that_raises_leaves_nothing_blocked():
    def handle(*_: object) -> None:
        raise InterruptedError

    before, previous = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(InterruptedError), without_signals():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert before == signal.pthread_sigmask(signal.SIG_BLOCK, ())
