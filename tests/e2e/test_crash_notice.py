"""What a rank leaves behind that ends without an exception, and that it ends as it would have ended."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holter.coordinator.recovery.journal import read
from holter.records import Body, Exam, Exited, Farewell

SCRIPT = Path(__file__).parent / "scripts" / "crash.py"
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
pytestmark = pytest.mark.job


def said(ended, rank: int, kind: type[Body]) -> Iterator[Body]:
    for entry in read(ended.run_dir / "journal"):
        if entry.observation.rank == rank and isinstance(entry.observation.body, kind):
            yield entry.observation.body


def last_breath(ended, rank: int) -> Exam:
    (exam,) = [exam for exam in said(ended, rank, Exam) if exam.reason == "last_breath"]
    return exam


def own_lines(stderr: str) -> list[str]:
    """Without ours, and without what differs from run to run: addresses, and the list of extension modules."""
    varying = ("holter: ", "Thread 0x", "Current thread 0x", "Extension modules")
    return [line for line in stderr.splitlines() if line and not line.startswith(varying)]


@pytest.mark.parametrize(
    ("how", "code", "options"),
    [
        ("abort", -signal.SIGABRT, []),
        pytest.param("fault", -signal.SIGSEGV, ["--faulthandler"], marks=pytest.mark.release),
        pytest.param("exit", 41, [], marks=pytest.mark.release),
        pytest.param("nothing", 0, [], marks=pytest.mark.release),
    ],
)
def test_it_ends_as_without_holter_and_its_calls_are_kept(  # noqa: PLR0917 - fixtures
    jobs, status, wait_for, how, code, options
):
    go = jobs.directory / "go"
    job = jobs.start(SCRIPT, how, "--wait-for", go, *options, by="python", env=ALONE)
    wait_for(lambda: [rank for rank in status(job)["ranks"] if rank["step"]], 100, "a sidecar that reports")
    go.touch()
    worn = job.wait()
    bare = jobs.run(SCRIPT, how, "--wait-for", go, *options, by="python", attached=False, env=ALONE)
    assert code == bare.code == worn.code, worn.stderr
    assert bare.stdout.split()[:3] == worn.stdout.split()[:3] == ["ready", "crash", "at"]
    if options:
        assert "Fatal Python error" in worn.stderr
        assert [line for line in own_lines(worn.stderr) if "crash.py" in line or "Fatal" in line] == [
            line for line in own_lines(bare.stderr) if "crash.py" in line or "Fatal" in line
        ]
    else:
        assert own_lines(bare.stderr) == own_lines(worn.stderr)
    if how == "nothing":
        assert not [exam for exam in said(worn, 0, Exam) if exam.reason == "last_breath"]
        return
    calls = last_breath(worn, 0).flight.calls
    assert (80, "all_reduce") == (calls[-1].sequence, calls[-1].operation), "forty steps, two parameters"


@pytest.mark.release
def test_os_exit_says_from_which_line(jobs):
    ended = jobs.run(SCRIPT, "exit", "--rank", 1, by="scheduler")
    assert 41 == ended.code
    (exited,) = said(ended, 1, Exited)
    assert isinstance(exited.farewell, Farewell)
    assert ("exit", "os._exit(41)") == (exited.farewell.kind, exited.farewell.text)
    line = 1 + SCRIPT.read_text().splitlines().index("    os._exit(41)")
    assert f"{SCRIPT}:{line} in <module>" == exited.farewell.where
    calls = last_breath(ended, 1).flight.calls
    assert 64 == len(calls)
    assert all(call.is_retired for call in calls), "it had finished what it began"


@pytest.mark.release
def test_a_mismatch_that_aborts_a_process_leaves_the_call_that_did_it(jobs, status, wait_for):
    go = jobs.directory / "go"
    job = jobs.start(SCRIPT, "mismatch", "--rank", 1, "--wait-for", go, by="scheduler")
    wait_for(lambda: len([rank for rank in status(job)["ranks"] if rank["step"]]) == 2, 100, "two sidecars that report")
    go.touch()
    ended = job.wait()
    assert 128 + signal.SIGABRT == ended.code, ended.stderr[-2000:]
    (dead,) = [rank for rank in (0, 1) for exited in said(ended, rank, Exited) if exited.signal == signal.SIGABRT]
    exam = last_breath(ended, dead)
    assert (((200 if dead == 1 else 100,),), False) == (exam.flight.calls[-1].sizes, exam.flight.calls[-1].is_retired)


@pytest.mark.release
def test_without_its_sidecar_a_crash_is_not_delayed(jobs, wait_for):
    delays_s = []
    for attempt in range(3):
        go = jobs.directory / f"go-{attempt}"
        env = {**ALONE, "TMPDIR": str(jobs.directory)}  # nobody is left to clean up
        job = jobs.start(SCRIPT, "abort", "--wait-for", go, by="python", env=env)
        assert job.process.stdout.readline() == "ready\n"
        for pid in job.pids("sidecar"):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda job=job: not job.pids("sidecar"), 20, "its end")
        go.touch()
        began = float(job.process.stdout.readline().split()[-1])
        assert -signal.SIGABRT == job.process.wait(timeout=60)
        delays_s.append(time.time() - began)
        if delays_s[-1] < 1.4:  # what it waits for one that never answers
            return
    pytest.fail(f"it took {delays_s} s")


@pytest.mark.release
def test_nothing_is_left_of_the_socket(jobs, tmp_path):
    own = tmp_path / "tmp"
    own.mkdir()
    for how in ("abort", "exit", "nothing"):
        jobs.run(SCRIPT, how, by="python", env={**ALONE, "TMPDIR": str(own)})
        assert [] == [path for path in own.iterdir() if path.name.startswith("holter-")]
