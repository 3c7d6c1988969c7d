"""Devices that fail under a rank: their drivers' word leads the incident, and what healthy devices tell is no news.

The driver is the stand-in library, which nvidia-ml-py loads in each sidecar as it would the real one.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Launcher

from holter.testing.nvml import NvmlLibrary

SCRIPT = Path(__file__).parent / "scripts" / "on_devices.py"
pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, of which the stand-in for NVML is made"),
]


@pytest.fixture
def library(tmp_path: Path) -> NvmlLibrary:
    made = NvmlLibrary.build(tmp_path)
    for number in range(2):
        made.set(number, uuid=f"GPU-{number}{number}{number}", nvlinks=4, ecc_corrected=17)
    return made


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(jobs: Launcher, library: NvmlLibrary) -> Run:
    def started(fault: str, steps: int, **env: str) -> list[dict[str, Any]]:
        job = jobs.start(SCRIPT, fault, steps, env={**library.environment, "CUDA_VISIBLE_DEVICES": "0,1", **env})
        return job.wait().alarms

    return started


def only(alarms: list[dict[str, Any]]) -> dict[str, Any]:
    assert 1 == len(alarms), [(one["causes"][0]["cause"], one["symptom"]) for one in alarms]
    return alarms[0]


def words(diagnosis: dict[str, Any]) -> str:
    return "\n".join([diagnosis["symptom"], *(proof["summary"] for proof in diagnosis["causes"][0]["evidence"])])


def test_a_rank_that_is_killed_when_its_device_falls_off_the_bus_is_the_devices_incident(run: Run) -> None:
    found = only(run("killed", 400))
    assert ("device_fault", [1], "critical") == (
        found["causes"][0]["cause"],
        found["causes"][0]["ranks"],
        found["severity"],
    )
    said = words(found)
    for word in ("Xid 79", "GPU-111", "SIGKILL", "drain it now", "DCGM_FI_DEV_XID_ERRORS", "GiB free"):
        assert word in said, (word, said)


@pytest.mark.release
def test_a_rank_that_hangs_in_its_driver_is_the_devices_incident(run: Run) -> None:
    found = only(run("hung", 400, HOLTER_ACTION="halt"))
    assert ("device_fault", [1], "halt") == (
        found["causes"][0]["cause"],
        found["causes"][0]["ranks"],
        found["action"]["directive"],
    )
    assert "Xid 119" in words(found)


def test_memory_that_cannot_be_corrected_halts_the_run(run: Run) -> None:
    found = only(run("memory", 800, HOLTER_ACTION="halt"))
    assert ("device_memory_error", [1], "halt") == (
        found["causes"][0]["cause"],
        found["causes"][0]["ranks"],
        found["action"]["directive"],
    )
    assert "Xid 94" in words(found)


@pytest.mark.release
def test_a_device_that_is_hot_makes_its_rank_late(run: Run, library: NvmlLibrary) -> None:
    library.set(1, reasons=0x40, clock=900, temperature=93)
    found = only(run("heat", 500))
    assert found["causes"][0]["cause"] in {"device_throttled", "slow_device"}
    assert [1] == found["causes"][0]["ranks"]
    assert "thermal" in words(found)
    assert "93 C" in words(found)


@pytest.mark.release
def test_a_link_that_recovers_again_and_again(run: Run) -> None:
    found = only(run("link", 500))
    assert ("link_errors", [1], "warning") == (
        found["causes"][0]["cause"],
        found["causes"][0]["ranks"],
        found["severity"],
    )
    assert "replays on the PCIe bus" not in found["symptom"]


@pytest.mark.release
def test_a_scripts_own_error_is_not_the_devices(run: Run) -> None:
    found = only(run("script", 400))
    assert "script_error" == found["causes"][0]["cause"]


@pytest.mark.release
@pytest.mark.parametrize("visible", ["0,1", "1,0", ""])
def test_what_healthy_devices_tell_is_no_news(run: Run, visible: str) -> None:
    assert [] == run("well", 500, CUDA_VISIBLE_DEVICES=visible)
