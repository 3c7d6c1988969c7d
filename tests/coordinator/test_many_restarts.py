"""A coordinator that is killed and started again, many times, with a fault somewhere in between, against a model: none lost, none doubled.

the model     the one fault of a run is one incident, with its rank and step, and keeps its id for good; every step of every rank is in the journal
the restart   on the same address, as rank 0's sidecar does it; over when every sidecar is connected again
"""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.agent.test_service import steps_in
from tests.coordinator.conftest import SimulatedRank, bound, eventually
from tests.coordinator.test_process import ended, start

from holter import clock
from holter.records import Nonfinite

NAN = [Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)]
PER_RUN = 5
PATIENCE_S = 60.0
MOMENTS = ("before", "meanwhile", "after")


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in run_dir.glob("incidents/*/diagnosis.json")]


async def trial(folder: Path, seed: int, num: int) -> list[float]:
    """One run; how long each restart took."""
    dice = random.Random(seed)  # noqa: S311 - a test
    run_dir, listener = folder / f"run-{seed}", bound()
    bad, at, moment = dice.randrange(2), dice.randrange(num), dice.choice(MOMENTS)
    process = start(run_dir, listener, ranks=2)
    ranks = [SimulatedRank(rank, listener.getsockname()[1], key=f"key {rank}") for rank in (0, 1)]
    for rank in ranks:
        rank.attach()
    step, fault_step, took_s, ids = 0, -1, [], set[str]()

    def train(number: int, *, has_fault: bool = False) -> None:
        nonlocal step, fault_step
        for place in range(number):
            is_it = has_fault and place == 0
            fault_step = step if is_it else fault_step
            for rank in ranks:
                rank.step(step, nonfinite=NAN if is_it and rank.rank == bad else None)
            step += 1

    train(3)
    await eventually(lambda: all(rank.uplink.is_connected for rank in ranks), PATIENCE_S)
    for number in range(num):
        said = moment if number == at else ""
        train(1, has_fault=said == "before")
        process.kill()
        began_s = clock.monotonic_s()
        await ended(process)
        train(2, has_fault=said == "meanwhile")
        await eventually(lambda: not any(rank.uplink.is_connected for rank in ranks), PATIENCE_S)
        process = start(run_dir, listener, "--goes-on", ranks=2)
        await eventually(lambda: all(rank.uplink.is_connected for rank in ranks), PATIENCE_S)
        took_s.append(clock.monotonic_s() - began_s)
        train(2, has_fault=said == "after")
        if fault_step >= 0:
            await eventually(lambda: incidents(run_dir), PATIENCE_S)
        found = incidents(run_dir)
        assert [(bad, fault_step)] * (fault_step >= 0) == [
            (one["causes"][0]["ranks"][0], one["first_step"]) for one in found
        ]
        ids |= {one["id"] for one in found}
    for rank in ranks:
        assert await rank.end(step)
    assert 0 == await ended(process)
    listener.close()
    ids |= {one["id"] for one in incidents(run_dir)}
    assert 1 == len(ids), ids
    assert {0: {*range(step)}, 1: {*range(step)}} == {
        rank: set(told) for rank, told in steps_in(run_dir / "journal").items()
    }
    return took_s


@pytest.mark.slow
async def test_restarts_lose_no_incident_and_double_none(tmp_path: Path) -> None:
    assert 2 == len(await trial(tmp_path, seed=3, num=2))


@pytest.mark.release
@pytest.mark.timeout(3600)
async def test_a_hundred_restarts(tmp_path: Path) -> None:
    took_s: list[float] = []
    for seed in range(100 // PER_RUN):
        took_s += await trial(tmp_path, seed, PER_RUN)
        await asyncio.sleep(0)
    took_s.sort()
    print(f"{len(took_s)} restarts: median {took_s[len(took_s) // 2]:.2f} s, longest {took_s[-1]:.2f} s")
    assert 100 == len(took_s)
