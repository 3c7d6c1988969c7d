"""Takeovers in a row, with a fault somewhere in between, checked against a model: one lead at a time, none lost, none doubled, each in time.

the model     tokens of leaders only grow; the one fault of a run is one incident, with its rank and step, and keeps its id for good
the leader    is stopped (and wakes up when another leads), or killed (and another process is started)
"""

import asyncio
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.conftest import SimulatedRank, eventually
from tests.transport.nats.conftest import Place, Process

from holter import clock
from holter.records import Nonfinite
from nats_servers import Server

NAN = [Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)]
PER_RUN = 5
BOUND_S = 3.0
PATIENCE_S = 60.0
MOMENTS = ("before", "meanwhile", "after")


@dataclass
class History:
    """What was seen of one run."""

    fault: tuple[int, int] = (0, 0)
    """(rank, step)"""
    took_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ids: list[set[str]] = field(default_factory=list)
    """After each takeover."""

    def check(self, incidents: list[dict[str, Any]], has_happened: bool) -> None:  # noqa: FBT001
        """Against the model."""
        assert self.tokens == sorted(set(self.tokens)), self.tokens
        self.ids.append({found["id"] for found in incidents})
        assert len(self.ids[-1]) == int(has_happened), incidents
        for found in incidents:
            top = found["causes"][0]
            assert (self.fault[0], self.fault[1]) == (top["ranks"][0], found["first_step"])
        told = [ids for ids in self.ids if ids]
        assert all(ids == told[0] for ids in told), self.ids


@dataclass
class Trial:
    """One run."""

    place: Place
    dice: random.Random
    ranks: list[SimulatedRank] = field(default_factory=list)
    history: History = field(default_factory=History)
    step: int = 0

    def train(self, num: int, *, has_fault: bool = False) -> None:
        for _ in range(num):
            for rank in self.ranks:
                rank.step(self.step, nonfinite=NAN if has_fault and rank.rank == self.history.fault[0] else None)
            if has_fault:
                self.history.fault = (self.history.fault[0], self.step)
                has_fault = False
            self.step += 1

    @property
    def token(self) -> int:
        return max(rank.uplink._carrier.coordinator_token for rank in self.ranks)

    async def take_over(self, leader: Process, other: Process, *, is_kill: bool, fault: str) -> tuple[Process, Process]:
        """The leader goes; who leads, and who stands by then."""
        before = self.token
        if fault == "before":
            self.train(1, has_fault=True)
        began_s = clock.monotonic_s()
        leader.send(signal.SIGKILL if is_kill else signal.SIGSTOP)
        self.train(2, has_fault=fault == "meanwhile")
        await eventually(lambda: self.token > before and self.place.leader() == other.pid, PATIENCE_S)
        self.history.took_s.append(clock.monotonic_s() - began_s)
        self.history.tokens.append(self.token)
        if not is_kill:
            leader.send(signal.SIGCONT)
            for _ in range(600):
                if await asyncio.to_thread(lambda: leader.stands_by):
                    break
                await asyncio.sleep(0.1)
            return other, leader
        leader.end()
        return other, await self.place.standby()


async def trial(place: Place, seed: int, num: int) -> History:
    dice = random.Random(seed)  # noqa: S311 - a test
    made = Trial(place, dice)
    leader = place.coordinator()
    made.ranks = [place.rank(rank) for rank in range(2)]
    for rank in made.ranks:
        rank.attach()
    made.train(3)
    await eventually(lambda: all(rank.uplink.is_connected for rank in made.ranks), PATIENCE_S)
    other = await place.standby()
    made.history.fault = (dice.randrange(2), -1)
    at, moment = dice.randrange(num), dice.choice(MOMENTS)
    has_happened = False
    for number in range(num):
        fault = moment if number == at else ""
        leader, other = await made.take_over(leader, other, is_kill=number % PER_RUN == PER_RUN - 2, fault=fault)
        if fault == "after":
            made.train(1, has_fault=True)
        has_happened = has_happened or bool(fault)
        made.train(2)
        if has_happened:
            await eventually(place.incidents, PATIENCE_S)
        await asyncio.sleep(0.8)
        made.history.check(place.incidents(), has_happened)
    for rank in made.ranks:
        assert await rank.end(made.step)
    await asyncio.to_thread(leader.process.wait, 30)
    made.history.check(place.incidents(), has_happened)
    return made.history


@pytest.mark.slow
async def test_takeovers_lose_no_incident_and_double_none(server: Server, place_at: Callable[..., Place]) -> None:
    history = await trial(place_at(server.address), seed=3, num=4)
    assert 4 == len(history.took_s)


@pytest.mark.release
@pytest.mark.timeout(3600)
async def test_a_hundred_takeovers(server: Server, place_at: Callable[..., Place], tmp_path: Path) -> None:
    took_s: list[float] = []
    for number in range(100 // PER_RUN):
        place = place_at(server.address, run_id=f"run-{number}")
        history = await trial(place, seed=number, num=PER_RUN)
        took_s += history.took_s
        print(number, history.fault, [round(each, 2) for each in history.took_s], flush=True)
        await place.end()
    took_s.sort()
    print(f"{len(took_s)} takeovers: median {took_s[len(took_s) // 2]:.2f} s, longest {took_s[-1]:.2f} s")
    (tmp_path / "took").write_text("\n".join(map(str, took_s)))
    assert 100 == len(took_s)
    assert took_s[-1] <= BOUND_S, took_s[-5:]
