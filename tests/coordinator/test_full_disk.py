"""A run directory without room: counted, shown, and every incident is still served."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.conftest import eventually

from holter.coordinator.disk import Disk
from holter.coordinator.incidents import Incidents
from holter.records import Nonfinite


@pytest.fixture
def full_directory(tmp_path: Path) -> Iterator[Path]:
    """16 KiB of tmpfs, all of it used."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root and mount(8) to make a full file system")
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    (folder / "filler").write_bytes(b"x" * 16 * 1024)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_run_directory_loses_no_incident_and_is_shown(run_coordinator: Any, full_directory: Path) -> None:
    running = await run_coordinator(full_directory)
    rank = running.rank(0, world_size=1)
    rank.attach()
    rank.step(0, nonfinite=[Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)])
    await eventually(running.coordinator.watched.incidents.all)
    await eventually(lambda: running.coordinator.watched.disk.failures >= 3)
    assert 1 == len((await running.get("/api/v1/incidents"))[1])
    _, status = await running.get("/api/v1/status")
    assert any("run directory" in warning and "No space left" in warning for warning in status["warnings"])
    assert await rank.end(1)
    assert "every rank has ended" == await asyncio.wait_for(running.task, 8.0)
    left = [name for _, _, names in os.walk(full_directory) for name in names if name.startswith(".")]
    assert [] == left, "nothing half-written stays behind"


async def test_an_incident_that_found_no_room_is_written_when_there_is_some(
    run_coordinator: Any, full_directory: Path
) -> None:
    running = await run_coordinator(full_directory)
    rank = running.rank(0, world_size=1)
    rank.attach()
    rank.step(0, nonfinite=[Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)])
    await eventually(running.coordinator.watched.incidents.all)
    await eventually(lambda: running.coordinator.watched.disk.failures >= 3)
    assert [] == left_in(full_directory)
    make_room(full_directory)
    await eventually(lambda: left_in(full_directory))


def make_room(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True)


def left_in(folder: Path) -> list[Any]:
    disk = Disk()
    found = Incidents(folder, disk)
    found.load()
    disk.close(5.0)
    return found.all()


async def test_a_run_directory_that_cannot_be_made_is_no_reason_to_stop(run_coordinator: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    running = await run_coordinator(tmp_path / "file" / "run")
    await eventually(lambda: running.coordinator.watched.disk.failures)
    assert (200, "ok\n") == await running.get("/healthz")
