"""A run of any number of simulated ranks before a real coordinator, for looking at the page and for measuring it.

    python tests/e2e/simulated.py RUN_DIR --ranks 4096 --fault nan        prints the address; ends with its standard input,
                                                                          where a line (see `told`) makes something happen

The coordinator, its detectors and everything that it serves are real; what the ranks say is made up here and heard without sockets.
"""

import argparse
import asyncio
import math
import random
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from holter import clock
from holter.coordinator.halt.driver import Outcome
from holter.coordinator.http.doors import DoorSettings
from holter.coordinator.identity import RunSettings
from holter.coordinator.service import Coordinator, Limits, ServiceSettings
from holter.records import (
    Attached,
    Body,
    Census,
    Exited,
    Farewell,
    Nonfinite,
    Observation,
    Phase,
    SaveFinished,
    StepCalls,
    StepDone,
    TensorEntry,
    Traffic,
)
from holter.transport import wire

TOKEN = "the token of a simulated run"
RANKS_OF_HOST = 8
PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
FAULTS = ("none", "nan", "death", "silence", "ending")


@dataclass
class Simulation:
    """Ranks that train in step; `fault` happens to one of them at `fault_step`."""

    coordinator: Coordinator
    num_ranks: int
    step_s: float
    fault: str = "none"
    fault_step: int = 30
    hosts: str = "node-"
    halts: list[tuple[str, str]] = field(default_factory=list)
    step: int = 0
    _began_ns: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(7))  # noqa: S311 - a simulation

    @property
    def victim(self) -> int:
        return self.num_ranks * 5 // 8

    def host(self, rank: int) -> str:
        return f"{self.hosts}{rank // RANKS_OF_HOST:04d}"

    def attach(self) -> None:
        for rank in range(self.num_ranks):
            hello = wire.Hello(
                run_id="",
                rank=rank,
                world_size=self.num_ranks,
                host=self.host(rank),
                rank_pid=1000 + rank,
                sidecar_pid=90_000 + rank,
                metrics_address="",
            )
            self.coordinator.watched.intake.connect(hello, clock.wall_ns())
            self._say(rank, 0, _attached(rank, self.num_ranks, self.host(rank)))
            if rank < RANKS_OF_HOST:
                self._say(rank, 0, _census())

    async def train(self, num_steps: int) -> None:
        """Each rank says where it is in every phase, and what its step showed at its end."""
        while self.step < num_steps and not self.halts:
            for place in range(len(PHASES)):
                for rank in self._alive():
                    # A few are a phase behind the others, as in any real job.
                    shown = PHASES[max(0, place - (self._random.random() < 0.06))]
                    self._say(rank, self.step, None, shown)
                    if rank % 512 == 0:
                        await asyncio.sleep(0)
                await asyncio.sleep(self.step_s / len(PHASES))
            await self._end_step()
            self.step += 1

    async def keep_alive(self) -> None:
        """Sidecars speak also while nothing happens."""
        while True:
            for rank in self._alive():
                self.coordinator.watched.intake.hear_sign(rank, clock.wall_ns())
            await asyncio.sleep(1.0)

    def end(self) -> None:
        for rank in self._alive():
            farewell = Farewell(kind="end", text="", where="")
            self._say(rank, self.step, _exited(rank, self.step, farewell=farewell, code=0))
            self.coordinator.watched.intake.goodbye(rank)

    async def _end_step(self) -> None:
        self._began_ns = clock.wall_ns()
        is_bad = self.fault != "none" and self.step == self.fault_step
        for rank in self._alive():
            self._say(rank, self.step, self._done(rank, is_bad=is_bad and self.fault == "nan"))
            self._say(rank, self.step, self._calls(rank))
            if rank % 128 == 0:
                await asyncio.sleep(0)
        if self.step % 20 == 19:
            kept = SaveFinished(path=f"/checkpoints/step-{self.step + 1}", framework="accelerate", seconds=1.5)
            self._say(0, self.step + 1, kept)
        if is_bad and self.fault == "death":
            self._say(self.victim, self.step, _exited(self.victim, self.step, number=9))

    def _alive(self) -> Iterator[int]:
        gone = self.victim if self.fault in {"death", "silence"} and self.step > self.fault_step else -1
        return (rank for rank in range(self.num_ranks) if rank != gone)

    def _done(self, rank: int, *, is_bad: bool) -> StepDone:
        loss = 1.2 + 4.0 * math.exp(-self.step / 60) + self._random.gauss(0, 0.03)
        bad = [Nonfinite(where="input", name="batch['input']", nans=1, infs=0, numel=4096)]
        is_bad = is_bad and rank == self.victim
        return StepDone(
            seconds=self.step_s * (1 + abs(self._random.gauss(0, 0.02)) + (0.6 if rank == self.num_ranks // 3 else 0)),
            phase_seconds={},
            micro_steps=1,
            loss=math.nan if is_bad else loss,
            gradient_norm=math.nan if is_bad else 0.8 + 2 * math.exp(-self.step / 40) + self._random.random() / 10,
            learning_rate=3e-4,
            batch=self.step * self.num_ranks + rank + 1,
            roots=_roots(self.step),
            nonfinite=bad if is_bad else [],
            overhead_ratio=0.004,
            check_interval=1,
        )

    def _calls(self, rank: int) -> Traffic:
        late_us = int(abs(self._random.gauss(0, 900))) + (30_000 if rank == self.num_ranks // 3 else 0)
        return Traffic(base_ns=self._began_ns, steps=[StepCalls(self.step, 0.001, [("0", self.step, late_us)])])

    def _say(self, rank: int, step: int, body: Body | None, phase: Phase = Phase.DATA) -> None:
        now_ns = clock.wall_ns()
        said = [] if body is None else [Observation(rank=rank, step=step, at_ns=now_ns, body=body)]
        beat = wire.Heartbeat(step + isinstance(body, StepDone), phase, 0, now_ns)
        report = wire.Report(heartbeat=beat, observations=said, dropped=0)
        if self.coordinator.watched.intake.hear(rank, report, now_ns):
            self.coordinator._wake.set()


def _attached(rank: int, world_size: int, host: str) -> Attached:
    return Attached(
        pid=1000 + rank,
        host=host,
        world_size=world_size,
        local_rank=rank % RANKS_OF_HOST,
        command=["train.py", "--simulated"],
        versions={"torch": "2.13.0"},
    )


def _census() -> Census:
    return Census(
        model=0,
        wrapper="DistributedDataParallel",
        is_replicated=True,
        optimizers=["AdamW"],
        backward_order=[0],
        part=0,
        parts=1,
        entries=[TensorEntry("embed.weight", (4, 4), "float32", True, False, 0)],
    )


def _roots(step: int) -> dict[str, int]:
    return {"parameters_before": 5000 + step, "gradients": 9000 + step, "parameters_after": 5001 + step}


def _exited(
    rank: int, step: int, farewell: Farewell | None = None, code: int | None = None, number: int | None = None
) -> Exited:
    return Exited(
        pid=1000 + rank,
        exit_code=code,
        signal=number,
        out_of_memory=False,
        last_step=step,
        last_phase=Phase.BACKWARD,
        farewell=farewell,
    )


def made(run_dir: Path, args: argparse.Namespace, listener: socket.socket) -> Simulation:
    """A coordinator that is not started yet, and its ranks."""
    run_dir.mkdir(parents=True, exist_ok=True)
    port = listener.getsockname()[1]
    run = RunSettings(run_dir, run_dir.name, f"http://127.0.0.1:{port}", args.ranks, "notify")
    halts: list[tuple[str, str]] = []

    def ask_halt(reason: str, by: str) -> str | None:
        if "refuse" in reason:
            return "a save is under way"
        halts.append((reason, by))
        return None

    settings = ServiceSettings(
        doors=DoorSettings(TOKEN), halt_token=TOKEN, version="simulated", limits=Limits(linger_s=args.linger_s)
    )
    coordinator = Coordinator(run, settings, ask_halt=ask_halt)
    return Simulation(coordinator, args.ranks, args.step_s, args.fault, args.fault_step, args.hosts, halts)


def told(simulation: Simulation, line: str) -> None:
    """What somebody wants to see: the fault, ranks that stand, a lost sidecar, the end, or how a halt came out."""
    run = simulation.coordinator.watched
    match line.split(" ", 1):
        case ["fault"]:
            simulation.fault_step = simulation.step + 1
        case ["lose"]:
            run.intake.disconnect(simulation.victim, simulation.victim + 1, clock.wall_ns(), is_closed=True)
        case ["end"]:
            simulation.end()
        case [("failed" | "called_off" | "incomplete") as name, why]:
            run.halts.outcome = Outcome(name, why, is_halted=False)


async def serve(args: argparse.Namespace) -> None:
    listener = socket.create_server(("127.0.0.1", args.port))
    simulation = made(Path(args.run_dir), args, listener)
    await simulation.coordinator.start(listener)
    judging = asyncio.create_task(simulation.coordinator.run())
    simulation.attach()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    alive = asyncio.create_task(simulation.keep_alive())
    training = asyncio.create_task(simulation.train(args.steps))
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line == "hang\n":
            training.cancel()
        if line == "end\n":
            training.cancel()
            alive.cancel()
        told(simulation, line.strip())
    for task in (alive, training):
        task.cancel()
    if args.fault == "ending":
        simulation.end()
    simulation.coordinator.stop()
    await judging


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--fault-step", type=int, default=30)
    parser.add_argument("--hosts", default="node-", help="what the names of the hosts begin with")
    parser.add_argument("--linger-s", type=float, default=0.0, help="how long it answers after a run with an incident")
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
