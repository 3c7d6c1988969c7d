"""Somebody sets the host's clock while a job hangs: the same cause, as soon as ever; and nothing is made up in a healthy one.

A library that is loaded before all others moves the time of day of every process of the job, or of one rank and its sidecar alone, as if that
were on another host.
"""

import os
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "corpus" / "scripts"
SOURCE = Path(__file__).parent / "scripts" / "shifted_clock.c"
pytestmark = [pytest.mark.job, pytest.mark.release]
HOUR_S = 3600
CAUSES = {"spin": "rank_stuck_in_python", "suspend": "rank_suspended", "kill": "rank_dead"}
USUAL_S = 6.3
"""After which a rank that spins is named where nobody sets the clock; a second of it is the machine's."""


@pytest.fixture
def shifted(jobs, tmp_path, wait_for):
    """Start a job whose clock is set soon after it trains: for all of its processes, or for one rank and its sidecar."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    library, clock = tmp_path / "shifted_clock.so", tmp_path / "clock"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)

    def start(script, how, set_by_s, only):
        clock.write_bytes(bytes(8))
        own = clock.with_name(f"clock.{only}") if only is not None else clock
        own.write_bytes(bytes(8))
        job = jobs.start(SCRIPTS / script, how, env={"LD_PRELOAD": str(library), "HOLTER_TEST_CLOCK": str(clock)})
        wait_for((job.run_dir / "journal").exists, 90, "the job to train")
        time.sleep(0.5)
        own.write_bytes(struct.pack("<q", set_by_s * 10**9))
        return job

    return start


def stopped(job):
    if job.process.poll() is None:
        os.killpg(job.process.pid, signal.SIGTERM)
    return job.wait()


@pytest.mark.parametrize(
    ("how", "set_by_s", "only"),
    [
        ("spin", -2 * HOUR_S, None),
        ("spin", 24 * HOUR_S, None),
        ("spin", -24 * HOUR_S, 1),
        ("spin", 1, 0),
        ("suspend", -24 * HOUR_S, None),
        ("kill", HOUR_S, None),
    ],
)
def test_a_hang_is_named_as_soon_as_ever(shifted, wait_for, how, set_by_s, only):
    job = shifted("process_faults.py", how, set_by_s, only)
    wait_for(lambda: list(job.run_dir.glob("incidents/*/diagnosis.json")), 60, "an incident")
    time.sleep(3.0)
    (told,) = stopped(job).diagnoses
    assert (CAUSES[how], [1]) == (told["causes"][0]["cause"], told["causes"][0]["ranks"])
    assert told["detected_after_s"] < USUAL_S + 2.0
    print(f"{how}, clock set by {set_by_s} s: named after {told['detected_after_s']:.1f} s")


@pytest.mark.parametrize(
    ("run", "set_by_s", "only"),
    [("jittery_ranks", -HOUR_S, 1), ("equally_slow", 24 * HOUR_S, None), ("one_pause", 1, 0), ("jittery_ranks", -1, 1)],
)
def test_nothing_is_made_up(shifted, run, set_by_s, only):
    ended = shifted("patient_runs.py", run, set_by_s, only).wait()
    assert 0 == ended.code
    assert [] == ended.alarms
