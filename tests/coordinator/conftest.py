"""A coordinator on a free port, and ranks that talk to it over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holter import clock
from holter.coordinator.announcer import AnnouncerSettings
from holter.coordinator.http.doors import DoorSettings
from holter.coordinator.identity import RunSettings
from holter.coordinator.service import Coordinator, Limits, ServiceSettings
from holter.records import (
    Attached,
    Body,
    Census,
    Exited,
    Farewell,
    Halting,
    Nonfinite,
    Observation,
    Order,
    Phase,
    RankState,
    StepDone,
    Table,
    TensorEntry,
)
from holter.transport import wire
from holter.transport.limits import UplinkSettings
from holter.transport.uplink import RankUplink

TOKEN = "a secret"
HALT_TOKEN = "another secret"
RUN_ID = "run-1"
TENSORS = ("a.weight", "b.weight")


def seen(rank: int, step: int, body: Body) -> Observation:
    return Observation(rank=rank, step=step, at_ns=clock.wall_ns(), body=body)


def attached(rank: int, world_size: int = 2, pid: int | None = None, step: int = 0) -> Observation:
    body = Attached(
        pid=1000 + rank if pid is None else pid,
        host="node-a",
        world_size=world_size,
        local_rank=rank,
        command=["train.py"],
        versions={"torch": "2.13.0"},
    )
    return seen(rank, step, body)


def census(rank: int, part: int = 0, parts: int = 1, names: Sequence[str] = TENSORS) -> Observation:
    body = Census(
        model=0,
        wrapper="DistributedDataParallel",
        is_replicated=True,
        optimizers=["AdamW"],
        backward_order=[1, 0] if part == 0 else [],
        part=part,
        parts=parts,
        entries=[TensorEntry(name, (4, 4), "float32", True, False, 0) for name in names],
    )
    return seen(rank, 0, body)


def done(
    rank: int, step: int, roots: dict[str, int] | None = None, nonfinite: list[Nonfinite] | None = None
) -> Observation:
    body = StepDone(
        seconds=0.2,
        phase_seconds={},
        micro_steps=1,
        loss=1.5,
        gradient_norm=0.7,
        learning_rate=1e-3,
        batch=step * 7 + rank,
        roots=healthy_roots(step) if roots is None else roots,
        nonfinite=nonfinite or [],
        overhead_ratio=0.004,
        check_interval=1,
    )
    return seen(rank, step, body)


def exited(rank: int, step: int, exit_code: int = 0, number: int | None = None) -> Observation:
    farewell = Farewell(kind="end", text="", where="") if exit_code == 0 and number is None else None
    body = Exited(
        pid=1000 + rank,
        exit_code=exit_code if number is None else None,
        signal=number,
        out_of_memory=False,
        last_step=step,
        last_phase=Phase.BACKWARD,
        farewell=farewell,
    )
    return seen(rank, step, body)


def healthy_roots(step: int) -> dict[str, int]:
    """What the step left is what the next one finds."""
    return {"parameters_before": 5000 + step, "gradients": 9000 + step, "parameters_after": 5001 + step}


@dataclass
class SimulatedRank:
    """A sidecar's uplink with a rank's history behind it, no process needed."""

    rank: int
    port: int
    world_size: int = 2
    token: str = TOKEN
    run_id: str = RUN_ID
    pid: int | None = None
    roots: dict[int, dict[str, int]] = field(default_factory=dict)
    notices: list[wire.Notice] = field(default_factory=list)
    fetches: list[wire.Fetch] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    obey: Callable[["SimulatedRank", Order], None] | None = None
    """What it does with an order in a halt; None: nothing."""
    has_tables: bool = True
    settings: UplinkSettings | None = None
    boot_id: str = ""
    metrics_address: str = ""
    key: str = ""
    address: str = ""
    """Empty: the coordinator's own port."""
    uplink: RankUplink = field(init=False)

    def __post_init__(self) -> None:
        hello = wire.Hello(
            run_id=self.run_id,
            rank=self.rank,
            world_size=self.world_size,
            host="node-a",
            rank_pid=self.pid or 1000 + self.rank,
            sidecar_pid=1,
            metrics_address=self.metrics_address,
            boot_id=self.boot_id,
            key=self.key,
        )
        self.uplink = RankUplink(
            self.address or f"127.0.0.1:{self.port}", self.token, hello, self._answer, self.settings
        )
        self.uplink.start()

    def attach(self) -> None:
        self.uplink.send(attached(self.rank, self.world_size, self.pid))
        self.uplink.send(census(self.rank))

    def step(self, step: int, roots: dict[str, int] | None = None, nonfinite: list[Nonfinite] | None = None) -> None:
        self.roots[step] = healthy_roots(step) if roots is None else roots
        self.uplink.beat(wire.Heartbeat(step + 1, Phase.DATA, 0, clock.wall_ns()))
        self.uplink.send(done(self.rank, step, self.roots[step], nonfinite), urgent=bool(nonfinite))

    def halting(self, state: RankState, step: int, halt: int = 0, why: str = "") -> None:
        """Say where it is in a halt."""
        self.uplink.send(seen(self.rank, step, Halting(state=state, halt=halt, why=why)), urgent=True)

    async def end(self, step: int, exit_code: int = 0, number: int | None = None) -> bool:
        self.uplink.send(exited(self.rank, step, exit_code, number), urgent=True)
        return await self.uplink.close(8.0)

    def vanish(self) -> None:
        """As by SIGKILL: no Goodbye."""
        task = self.uplink._carrier._task  # type: ignore[attr-defined]
        for running in (task, self.uplink._task):
            if running is not None:
                running.cancel()

    def _answer(self, message: wire.Downward) -> wire.Upward | None:
        # What launchers and the job's log are told at an end is looked at elsewhere.
        if isinstance(message, wire.Notice) and message.kind in {"incident", "message"}:
            self.notices.append(message)
        if isinstance(message, wire.Halt):
            self.orders.append(message.order)
            if self.obey is not None:
                self.obey(self, message.order)
        if not isinstance(message, wire.Fetch):
            return None
        self.fetches.append(message)
        return wire.Fetched(request=message.request, observation=self._table(message) if self.has_tables else None)

    def _table(self, asked: wire.Fetch) -> Observation | None:
        root = self.roots[asked.step].get(asked.tensor_class)
        if root is None:
            return None
        # The first tensor carries the root's difference, the second is equal everywhere.
        body = Table(
            tensor_class=asked.tensor_class, root=root, names=list(TENSORS), fingerprints=[root, 1], norms=[1.0, 1.0]
        )
        return seen(self.rank, asked.step, body)


@dataclass
class Running:
    """A coordinator that serves."""

    coordinator: Coordinator
    port: int
    task: asyncio.Task[str]
    ranks: list[SimulatedRank] = field(default_factory=list)

    def rank(self, rank: int, **options: Any) -> SimulatedRank:
        made = SimulatedRank(rank, self.port, **options)
        self.ranks.append(made)
        return made

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()


def bound() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


async def eventually(condition: Callable[[], Any], deadline_s: float = 8.0) -> Any:
    """What the condition gives once it is true; fails when it never is."""
    began_s = clock.monotonic_s()
    while not (found := condition()):
        assert clock.monotonic_s() - began_s < deadline_s, "did not come true in time"
        await asyncio.sleep(0.01)
    return found


@pytest.fixture
async def run_coordinator(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Running]]]:
    """Start coordinators; whatever still runs at the end is stopped."""
    started: list[Running] = []

    async def start(run_dir: Path = tmp_path, listener: socket.socket | None = None, **options: Any) -> Running:
        listener = listener or bound()
        port = listener.getsockname()[1]
        limits = options.pop("limits", Limits())
        announcing = options.pop("announcing", AnnouncerSettings())
        doors = options.pop("doors", DoorSettings(TOKEN))
        given = {name: options.pop(name) for name in ("detectors", "ask_halt") if name in options}
        # Simulated ranks obey no orders; tests of halts say what they want.
        run = RunSettings(run_dir, RUN_ID, f"http://127.0.0.1:{port}", **({"action": "notify"} | options))
        settings = ServiceSettings(
            doors=doors, halt_token=HALT_TOKEN, version="test", limits=limits, announcing=announcing
        )
        coordinator = Coordinator(run, settings, **given)
        await coordinator.start(listener)
        running = Running(coordinator, port, asyncio.create_task(coordinator.run()))
        started.append(running)
        return running

    yield start
    for running in started:
        await asyncio.gather(*(rank.uplink.close(0.0) for rank in running.ranks))
        running.coordinator.stop()
        await asyncio.wait_for(running.task, 10.0)
