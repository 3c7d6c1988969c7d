"""What a coordinator and a nats-server cost while many ranks report through it, a step each a second.

    python tests/bench/bench_nats.py [--ranks 4096] [--hosts 512] [--seconds 30] [--limit 0.3]

Server and coordinator are the real processes; ranks are simulated by one other process, eight on each of its connections, over real sockets. What they say goes
into the stream without waiting for the server's acknowledgement, as many sidecars at once do. CPU seconds are of each process, so that the generator's share
is told apart. In the middle one rank reports NaN: how long until its incident is on the disk. Exits with 1 when a rank was not heard, or no incident came.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from holter import clock
from holter.records import Attached, Body, Nonfinite, Observation, Phase, StepDone
from holter.transport import wire
from holter.transport.nats import frames
from holter.transport.nats.frames import Greeting, Said
from holter.transport.nats.line import NatsPlace, line_to
from holter.transport.nats.subjects import Subjects
from nats_servers import Server

RUN, TOKEN = "bench", "a token"
FULL = 16_384
DEADLINE_S = 180.0


def said(rank: int, step: int, body: Body) -> Observation:
    return Observation(rank=rank, step=step, at_ns=clock.wall_ns(), body=body)


def done(rank: int, step: int, *, is_bad: bool) -> Observation:
    bad = [Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)] if is_bad else []
    roots = {"parameters_before": 5000 + step, "gradients": 9000 + step, "parameters_after": 5001 + step}
    body = StepDone(
        seconds=1.0,
        phase_seconds={},
        micro_steps=1,
        loss=1.5,
        gradient_norm=0.7,
        learning_rate=1e-3,
        batch=step * 100_000 + rank,
        roots=roots,
        nonfinite=bad,
        overhead_ratio=0.004,
        check_interval=1,
    )
    return said(rank, step, body)


class Host:
    """Some ranks on one connection."""

    def __init__(self, ranks: range, world_size: int) -> None:
        self.ranks, self.world_size, self.who = ranks, world_size, os.urandom(8)
        self.names = Subjects(RUN)

    async def greet(self, line: Any) -> None:
        for rank in self.ranks:
            hello = wire.Hello(
                run_id=RUN,
                rank=rank,
                world_size=self.world_size,
                host=f"node-{rank // 8}",
                rank_pid=rank,
                sidecar_pid=1,
                metrics_address="",
            )
            frame = frames.encode(Said(self.who, Greeting(token=TOKEN, hello=hello)))
            await line.client.publish(self.names.hello(str(rank)), frame)
            attached = Attached(
                pid=rank,
                host=f"node-{rank // 8}",
                world_size=self.world_size,
                local_rank=rank % 8,
                command=[],
                versions={},
            )
            await self.report(line, rank, [said(rank, 0, attached)], 0)

    async def step(self, line: Any, step: int, bad_rank: int) -> None:
        for rank in self.ranks:
            await self.report(line, rank, [done(rank, step, is_bad=rank == bad_rank)], step)

    async def report(self, line: Any, rank: int, observations: list[Observation], step: int) -> None:
        heartbeat = wire.Heartbeat(step + 1, Phase.DATA, 0, clock.wall_ns())
        report = wire.Report(heartbeat=heartbeat, observations=observations, dropped=0)
        await line.client.publish(self.names.said(str(rank)), frames.encode(Said(self.who, report)))


async def generate(address: str, num_ranks: int, num_hosts: int, bad_rank: int, bad_step: int) -> None:
    """Until killed; prints when the bad step was said."""
    each = num_ranks // num_hosts
    hosts = [Host(range(number * each, (number + 1) * each), num_ranks) for number in range(num_hosts)]
    began = asyncio.Event()

    async def live(host: Host, number: int) -> None:
        async with line_to(NatsPlace(address), f"host-{number}") as line:
            await host.greet(line)
            await began.wait()
            first_s = time.monotonic() + number / num_hosts
            for step in range(10**6):
                await asyncio.sleep(max(0.0, first_s + step - time.monotonic()))
                is_bad = step == bad_step and bad_rank in host.ranks
                await host.step(line, step, bad_rank if is_bad else -1)
                if is_bad:
                    print(f"bad {time.time()}", flush=True)

    lives = []
    for number, host in enumerate(hosts):
        lives.append(asyncio.create_task(live(host, number)))
        if number % 16 == 15:
            await asyncio.sleep(0.2)
    await asyncio.sleep(2.0)
    print("ready", flush=True)
    began.set()
    await asyncio.gather(*lives)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def connected(run_dir: Path) -> int:
    try:
        address = json.loads((run_dir / "coordinator.json").read_text())["address"]
        with urllib.request.urlopen(f"{address}/api/v1/status", timeout=30) as found:
            return sum(
                rank["sidecar"] == "connected" and (rank["step"] or 0) > 0 for rank in json.loads(found.read())["ranks"]
            )
    except (OSError, ValueError):
        return 0


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run of it."""
    server = Server(folder, "n0")
    server.start()
    server.wait()
    run_dir = folder / RUN
    (folder / "token").write_text(TOKEN)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOLTER")}
    environ |= {
        "HOLTER_NATS": server.address,
        "HOLTER_MEMORY": "off",
        "HOLTER_ACTION": "notify",
        "HOLTER_LINGER_S": "0",
    }
    words = [
        "coordinator",
        "--run-dir",
        str(run_dir),
        "--world-size",
        str(args.ranks),
        "--token-file",
        str(folder / "token"),
    ]
    bad_step = 8 + args.seconds // 2
    generator_words = [
        __file__,
        "--generate",
        server.address,
        "--ranks",
        args.ranks,
        "--hosts",
        args.hosts,
        "--seconds",
        bad_step,
    ]
    with (folder / "coordinator.log").open("w") as log:
        coordinator = subprocess.Popen(
            [sys.executable, "-m", "holter.cli", *words], env=environ, stdout=log, stderr=log
        )
    generator = None
    try:
        until = time.monotonic() + DEADLINE_S
        while not (run_dir / "coordinator.json").exists():
            assert time.monotonic() < until, (folder / "coordinator.log").read_text()
            time.sleep(0.1)
        generator = subprocess.Popen(
            [sys.executable, *map(str, generator_words)], env=environ, stdout=subprocess.PIPE, text=True
        )
        assert generator.stdout is not None
        generator.stdout.readline()
        time.sleep(8.0)
        assert server.process is not None
        watched = {"coordinator": coordinator.pid, "server": server.process.pid, "generator": generator.pid}
        processes = {name: psutil.Process(pid) for name, pid in watched.items()}
        before, began = {name: cpu_s(one) for name, one in processes.items()}, time.monotonic()
        bad_s = float(generator.stdout.readline().split()[1])
        while not (found := list(run_dir.glob("incidents/*/diagnosis.json"))) and time.time() - bad_s < DEADLINE_S:
            time.sleep(0.02)
        incident_s = time.time() - bad_s
        time.sleep(max(0.0, args.seconds - (time.monotonic() - began)))
        seconds = time.monotonic() - began
        cores = {name: (cpu_s(one) - before[name]) / seconds for name, one in processes.items()}
        memory = {name: one.memory_info().rss / 2**20 for name, one in processes.items()}
        return {"cores": cores, "mib": memory, "incident_s": incident_s if found else None, "heard": connected(run_dir)}
    finally:
        for process in filter(None, (generator, coordinator)):
            process.kill()
            process.wait()
        server.kill()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=FULL // 4)
    parser.add_argument("--hosts", type=int, default=FULL // 32)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--generate", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate:
        asyncio.run(generate(args.generate, args.ranks, args.hosts, args.ranks * 5 // 8, args.seconds))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args)
    print(
        f"{args.ranks} ranks on {args.hosts} connections, a step and a message each a second, load of the machine {os.getloadavg()[0]:.1f}"
    )
    for name, cores in found["cores"].items():
        each_us = cores / args.ranks * 1e6
        print(
            f"  {name:12} {cores:.2f} cores, {each_us:.0f} us a message; {found['mib'][name]:.0f} MiB; computed for {FULL}: {cores * FULL / args.ranks:.2f} cores"
        )
    print(
        f"  incident on the disk {found['incident_s'] or -1:.2f} s after its rank said it; {found['heard']} of {args.ranks} ranks heard"
    )
    return int(found["incident_s"] is None or found["heard"] < args.ranks)


if __name__ == "__main__":
    sys.exit(main())
