"""Coordinators that are killed or stopped, again and again: the job is watched again within ten seconds, or says within fifteen that it is not."""

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "bits.py"
pytestmark = [pytest.mark.job, pytest.mark.release]

AGAIN_S, SAID_S = 10.0, 15.0
SLACK_S = 2.0
"""Sidecars look twenty times a second, and scrapes here ten; both on a machine that may be busy."""


def read(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
        return answer.read().decode()


def is_unwatched(address):
    return re.search(r"^holter_unwatched\{.*\} 1", read(address, "/metrics"), re.MULTILINE) is not None


def is_watched(address):
    return json.loads(read(address, "/healthz"))["coordinator"]


def ready(jobs, status, wait_for):
    job = jobs.start(SCRIPT, "--steps", 1_000_000)
    wait_for(lambda: len(status(job)["ranks"]) == 2, 60, "two ranks")
    wait_for(lambda: min(rank["step"] or 0 for rank in status(job)["ranks"]) > 20, 60, "20 steps")
    return job, [rank["metrics_address"] for rank in status(job)["ranks"]]


def coordinator(job):
    return json.loads((job.run_dir / "coordinator.json").read_text())["pid"]


def watched_again(job, sidecars, former, deadline_s):
    """Seconds until another coordinator hears all of them, and until all say that nobody does; None: it did not happen."""
    began, said = time.monotonic(), None
    while time.monotonic() - began < deadline_s:
        if said is None and all(map(is_unwatched, sidecars)):
            said = time.monotonic() - began
        if coordinator(job) != former and all(map(is_watched, sidecars)):
            return time.monotonic() - began, said
        time.sleep(0.1)
    return None, said


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num", [9, 11])
def test_it_is_watched_again_or_says_that_it_is_not(jobs, status, wait_for, num):
    """Twenty kills in two jobs, each as soon as the one before was made good: the pauses before a restart grow to eight seconds, and in the second job to a minute."""
    job, sidecars = ready(jobs, status, wait_for)
    took = []
    for _ in range(num):
        former = coordinator(job)
        os.kill(former, signal.SIGKILL)
        again, said = watched_again(job, sidecars, former, 90)
        took.append((again, said))
        assert again is not None, took
        assert again <= AGAIN_S + SLACK_S or (said is not None and said <= SAID_S + SLACK_S), took
    print("seconds until it was watched again, and until it said that it was not:", took)
    os.killpg(job.process.pid, signal.SIGTERM)
    log = job.wait().stderr
    num_said = sum(said is not None for _, said in took)
    assert num_said <= log.count("is not watched. Training goes on") + 1
    assert num_said == 0 or "is watched again" in log


@pytest.mark.timeout(200)
def test_a_coordinator_that_is_stopped_for_half_a_minute_is_said_to_be_missing_and_then_to_be_back(
    jobs, status, wait_for
):
    job, sidecars = ready(jobs, status, wait_for)
    stopped = coordinator(job)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    try:
        wait_for(lambda: all(map(is_unwatched, sidecars)), 40, "somebody to say so")
        said = time.monotonic() - began
        time.sleep(max(0.0, 30.0 - said))
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: all(map(is_watched, sidecars)), 20, "the sidecars to come back")
    print(f"said after {said:.1f} s")
    assert said <= SAID_S + SLACK_S
    assert stopped == coordinator(job), "it was not replaced"
    time.sleep(3.0)
    assert [] == status(job)["incidents"], "nobody is blamed for the coordinator's own pause"
    os.killpg(job.process.pid, signal.SIGTERM)
    job.wait()
