"""A process that leaves a halt ends with 93, whatever else it would do at its end."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

HEAD = """
import atexit, multiprocessing, os, sys, threading, time
from holter.rank.hold.halts import Leaving, find_agent
leaving = Leaving(lambda: os.write(1, b"farewell\\n"), agent=find_agent() if "elastic" in sys.argv else 0)
leaving.register()
atexit.register(lambda: print("theirs"))
"""


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + textwrap.dedent(script), *args]
    # What is printed waits in a buffer, as in most jobs.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


def test_the_script_ends_as_by_sys_exit_and_the_last_word_is_ours():
    ended = run("""
        class Teardown:
            def __del__(self): os.abort()
        kept = Teardown()
        try:
            leaving.leave(tells_agent=False)
        finally:
            print("finally")
    """)
    assert (ended.returncode, ended.stdout) == (93, "farewell\nfinally\ntheirs\n"), ended.stderr


def test_a_process_that_does_not_leave_ends_as_it_would():
    ended = run("sys.exit(3)")
    assert (ended.returncode, ended.stdout) == (3, "theirs\n")


def test_a_forked_child_of_one_that_leaves_ends_as_it_would():
    ended = run("""
        leaving.is_leaving = True
        pid = os.fork()
        if pid == 0:
            sys.exit(4)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    assert ended.returncode == 93
    assert "4\n" in ended.stdout


def test_from_a_thread_what_was_printed_is_not_lost_and_workers_end_too():
    began = time.monotonic()
    ended = run("""
        if __name__ == "__main__":
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
            worker.start()
            print("printed", end="")
            threading.Thread(target=lambda: leaving.leave_now(tells_agent=False)).start()
            time.sleep(60)
    """)
    assert (ended.returncode, ended.stdout) == (93, "farewell\nprinted")
    assert time.monotonic() - began < 50, "the worker held the pipe"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["catches", "blocks"])
def test_a_script_that_does_not_end_is_ended(how):
    ended = run(
        """
        class Lock:
            def write(self, text): return len(text)
            def flush(self): time.sleep(60)
        sys.modules["holter.rank.hold.halts"].SCRIPT_S = 2.0
        if sys.argv[1] == "blocks":
            sys.stdout = Lock()
            threading.Thread(target=time.sleep, args=(60,)).start()
        try:
            leaving.leave(tells_agent=False)
        except SystemExit:
            if sys.argv[1] == "blocks":
                raise
        time.sleep(60)
        """,
        how,
    )
    assert ended.returncode == 93


AGENT = """
import os, subprocess, sys
worker = subprocess.Popen(["/bin/sh", "-c", '"$@"; exit $?', "sh", *sys.argv[1:]], env={**os.environ, "TORCHELASTIC_RESTART_COUNT": "0"})
sys.exit(worker.wait())
"""


@pytest.mark.parametrize("is_told", [True, False])
def test_the_elastic_agent_is_found_behind_a_shell_and_ended(is_told):
    script = HEAD + f"leaving.leave(tells_agent={is_told})"
    command = [sys.executable, "-c", AGENT, sys.executable, "-c", script, "elastic"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False, env=environ)
    assert ended.returncode == (-signal.SIGTERM if is_told else 93)
