"""The sidecar's life: up quickly, small, serving its metrics, and gone with its rank."""

import os
import re
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parent / "scripts" / "bits.py"
pytestmark = pytest.mark.job


def test_a_sidecar_is_small_serves_metrics_and_ends_with_its_job(jobs, status, wait_for):
    job = jobs.start(SCRIPT, "--steps", 1500)
    wait_for(lambda: len(status(job)["ranks"]) == 2, 60, "two ranks")
    wait_for(lambda: min(rank["step"] or 0 for rank in status(job)["ranks"]) > 100, 60, "100 steps")
    sidecars = job.pids("sidecar")
    assert len(sidecars) == 2
    for pid in sidecars:
        process = psutil.Process(pid)
        assert process.memory_info().rss < 60 << 20
        assert process.status() != psutil.STATUS_ZOMBIE
        # Nobody's child but init's: a script that waits for its children does not meet it.
        ranks = [p.pid for p in psutil.process_iter(["cmdline"]) if "bits.py" in " ".join(p.info["cmdline"] or ())]
        assert process.ppid() not in ranks
        assert os.getsid(pid) != os.getsid(job.process.pid)
    for rank in status(job)["ranks"]:
        with urllib.request.urlopen(f"http://{rank['metrics_address']}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        assert re.search(rf'^holter_step{{.*rank="{rank["rank"]}".*}} \d', text, re.MULTILINE)
        assert "holter_overhead_ratio" in text
    ended = job.wait()
    assert ended.code == 0
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in sidecars), 20, "zombies to be reaped by init")


@pytest.mark.release
def test_a_killed_job_leaves_nothing_behind(jobs, status, wait_for):
    """SIGKILL of the launcher and of every rank: nobody says goodbye, and still nobody lingers."""
    job = jobs.start(SCRIPT, "--steps", 100000)
    wait_for(lambda: len(status(job)["ranks"]) == 2, 60, "two ranks")
    launcher = psutil.Process(job.process.pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        os.kill(process.pid, signal.SIGKILL)
    ended = job.wait()
    assert ended.code == -signal.SIGKILL


@pytest.mark.release
def test_the_progress_line_is_drawn_on_a_terminal_and_given_back(jobs, terminal):
    """Rank 0's standard error is a terminal: the live line appears on its last row, and the row is given back at the end."""
    text = terminal(jobs, SCRIPT, "--steps", "1200")
    assert "holter  step" in text
    assert "\x1b[1;23r" in text
    assert text.rstrip().endswith("\x1b[r\x1b8") or "\x1b[r" in text.split("holter  step")[-1]
