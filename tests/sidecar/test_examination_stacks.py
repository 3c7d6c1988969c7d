"""Stacks of real processes that hang in one way or another."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holter.sidecar import examination

SPIN = "def spin():\n    while True:\n        pass\nspin()\n"
SLEEP = "import time\ndef rest():\n    time.sleep(100)\nrest()\n"
LOCK = "import threading\nlock = threading.Lock()\nlock.acquire()\ndef wait():\n    lock.acquire()\nwait()\n"
HOLD = "import ctypes\ndef hold():\n    ctypes.PyDLL(None).sleep(100)\nhold()\n"
THREADS = (
    "import threading, time\n"
    "for number in range(80):\n"
    "    threading.Thread(target=time.sleep, args=(100,), daemon=True, name=f'helper {number}').start()\n"
    "def deep(left):\n"
    "    time.sleep(100) if not left else deep(left - 1)\n"
    "deep(200)\n"
)

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Run a script and wait until it is in its function."""
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> subprocess.Popen[bytes]:
        script = tmp_path / f"script_{len(started)}.py"
        ready = tmp_path / f"ready_{len(started)}"
        lines = code.splitlines()
        script.write_text("\n".join([*lines[:-1], f"open({str(ready)!r}, 'w').close()", lines[-1]]))
        process = subprocess.Popen([sys.executable, "-S", str(script)])
        started.append(process)
        deadline = time.monotonic() + 20
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def status(pid: int) -> dict[str, str]:
    """What the kernel says of a process; empty: it is gone."""
    path = Path(f"/proc/{pid}/status")
    return (
        dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line) if path.exists() else {}
    )


async def main_thread(pid: int, depth: str = "quick"):
    found, error = await examination.take_stacks(pid, depth, 20.0)
    assert found, error
    assert [True] == [thread.is_main for thread in found if thread.is_main]
    assert found[0].is_main
    return found[0], error


@pytest.mark.parametrize(
    ("code", "function", "line"),
    [(SPIN, "spin", 3), (SLEEP, "rest", 3), (LOCK, "wait", 5)],
    ids=["endless loop", "sleep", "lock"],
)
async def test_a_rank_that_hangs_in_python_shows_function_file_and_line(start, code, function, line):
    main, error = await main_thread(start(code).pid)
    assert ("", function, False) == (error, main.frames[0].function, main.frames[0].is_native)
    assert main.frames[0].file.endswith(".py")
    assert main.frames[0].line in (line - 1, line)
    assert "<module>" == main.frames[-1].function


@pytest.mark.parametrize("depth", ["quick", "native"])
async def test_a_stage_of_a_pipeline_shows_its_micro_batch(start, depth):
    body = "def forward_one_chunk(fwd_chunk_id):\n    import time; time.sleep(100)\n"
    where = "/lib/torch/distributed/pipelining/stage.py"
    code = f"exec(compile({body!r}, {where!r}, 'exec'))\nsecret = 'hidden'\nforward_one_chunk(3)\n"
    main, _ = await main_thread(start(code).pid, depth)
    assert "forward pass of micro-batch 3" == main.work
    assert "hidden" not in repr(main)


async def test_a_loop_is_active_and_has_the_lock_and_a_sleep_neither(start):
    spinning, _ = await main_thread(start(SPIN).pid)
    resting, _ = await main_thread(start(SLEEP).pid)
    assert (True, True) == (spinning.is_active, spinning.owns_lock)
    assert (False, False) == (resting.is_active, resting.owns_lock)


async def test_native_code_that_holds_the_lock_is_named(start):
    main, error = await main_thread(start(HOLD).pid, "native")
    assert "" == error
    assert main.owns_lock
    native = [frame.function for frame in main.frames if frame.is_native]
    assert {"sleep", "clock_nanosleep"} & set(native)
    assert ["hold", "<module>"] == [frame.function for frame in main.frames if not frame.is_native]


async def test_the_rank_runs_on_after_a_native_look(start):
    process = start(SPIN)
    await main_thread(process.pid, "native")
    assert {"State": "R (running)", "TracerPid": "0"}.items() <= status(process.pid).items()


@pytest.mark.parametrize("depth", ["quick", "native"])
async def test_a_stopped_process_has_stacks_and_native_says_what_is_missing(start, depth, wait_for):
    process = start(SLEEP)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: status(process.pid)["State"].startswith(("T", "t")), 20, "its stop")
    main, error = await main_thread(process.pid, depth)
    assert "rest" == main.frames[0].function
    assert error.startswith("no native frames: ") if depth == "native" else not error


@pytest.fixture
def sleep() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


async def test_a_process_that_is_gone_or_has_no_python_gives_a_reason(start, sleep):
    process = start(SLEEP)
    process.kill()
    process.wait()
    found, error = await examination.take_stacks(process.pid, "native")
    assert ([], True) == (found, error.startswith("no native frames: "))
    found, error = await examination.take_stacks(sleep.pid, "quick")
    assert ([], "no stacks: Failed to find python version from target process") == (found, error)


async def test_threads_and_frames_are_bounded_and_the_main_thread_is_among_them(start):
    main, _ = await main_thread(start(THREADS).pid)
    found, _ = await examination.take_stacks(start(THREADS).pid, "quick", 20.0)
    assert (examination.MAX_THREADS, examination.MAX_STACK_FRAMES) == (len(found), len(main.frames))
    assert "deep" == main.frames[0].function


async def test_a_program_that_does_not_answer_is_killed_and_reaped(tmp_path, monkeypatch):
    slow = tmp_path / "py-spy"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(examination.sys, "executable", str(tmp_path / "python"))
    began = time.monotonic()
    found, error = await examination.take_stacks(1, "quick", 1.0)
    assert ([], True) == (found, "did not answer in" in error)
    assert time.monotonic() - began < 10
    assert not status(int((tmp_path / "pid").read_text()))


async def test_a_missing_program_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(examination.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ([], "py-spy is not installed beside this interpreter nor on the PATH") == await examination.take_stacks(
        1, "quick"
    )


def test_a_complaint_becomes_one_line():
    complaint = (
        "Error: Failed to get stack traces\n\nCaused by:\n    0: Failed to suspend process\n    1: EPERM: Operation not"
        " permitted\n\nStack backtrace:\n   0: anyhow::error\n"
    )
    assert (
        "Failed to get stack traces: Failed to suspend process: EPERM: Operation not permitted"
        == examination.explain_complaint(complaint)
    )
    assert "py-spy failed without a word" == examination.explain_complaint("\n")


@pytest.mark.parametrize("output", [b"", b"{}", b"[1]", b'[{"pid": "x"}]'])
def test_what_is_not_py_spys_is_refused(output):
    with pytest.raises(msgspec.MsgspecError):
        examination.parse_stacks(output)
