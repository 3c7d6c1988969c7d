"""What a coordinator costs at sixteen thousand ranks behind agents, one step a second.

    python tests/bench/bench_hosts.py [--hosts 2048] [--quarter] [--seconds 20] [--rounds 2] [--hour] [--nats] [--json]

The coordinator is the real process with its real detectors, on its default transport or, with `--nats`, behind a real nats-server. The hosts are simulated by one other process, each with a connection of
its own: what they send are an agent's own records (`HostReport`, made by `join`, encoded by `wire`), and they answer what the coordinator asks; there are
no sidecars and no training behind them, so what the generator costs is told apart. A mesh of four axes: every rank tells roots along each.
Beside them stand connections that say nothing and scrapers. In every round the coordinator is killed once and started again: all hosts come back at once.

    cause to incident    from a host's sending the faulty record to the notice for the job's log, of a NaN (urgent) and of replicas that part (not urgent)
    compressed hour      3,600 steps of 128 hosts as fast as they are taken, and the memory at each quarter of it

`--quarter` runs 512 hosts and says what four times as many would cost. Exits with 1 when a fault was not named, or the memory grew.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from holter import clock
from holter.records import Attached, Census, Nonfinite, Observation, Phase, StepDone, Table, TensorEntry
from holter.records.joined import join
from holter.transport import wire
from holter.transport.nats import frames
from holter.transport.nats.frames import Greeting, Said
from holter.transport.nats.line import NatsPlace, failures, line_to
from holter.transport.nats.subjects import ALL, Subjects, host_name
from nats_servers import Server

RUN = "bench"
Say = Callable[[wire.Upward], Awaitable[None]]
TOKEN = "bench"
PER_HOST = 8
AXES = ("pp", "dp", "cp", "tp")
NUM_TENSORS = 64
HOUR_HOSTS, HOUR_STEPS = 128, 3600
WANTED_CORE, WANTED_S = 0.3, 2.0
SAYS = {"parted": "silent_data_corruption", "nan": "nonfinite"}
MAX_GROWTH = 1.15
"""Of the memory between the first quarter of the hour and its end."""
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


def sizes(world: int) -> dict[str, int]:
    """Four axes whose product is the world."""
    return {"pp": 4, "dp": world // 256, "cp": 8, "tp": 8}


class Layout:
    """Which subgroup a rank is in along each axis, named by its lowest rank."""

    def __init__(self, world: int) -> None:
        strides, below = {}, 1
        for axis, size in reversed(sizes(world).items()):
            strides[axis] = (below, size)
            below *= size
        self._lowest = [
            {axis: rank - rank // stride % size * stride for axis, (stride, size) in strides.items()}
            for rank in range(world)
        ]

    def roots(self, rank: int, step: int) -> dict[str, int]:
        """What the step left is what the next one finds."""
        found = {}
        for axis, lowest in self._lowest[rank].items():
            for name, number in (
                ("parameters_before", step),
                ("gradients", step + 10**6),
                ("parameters_after", step + 1),
            ):
                found[f"{name}@{axis}#{lowest}"] = (number * 1_000_003 + lowest * 7 + len(axis)) % 2**63
        return found


@dataclass
class Load:
    """What is simulated, and what came of it."""

    hosts: int
    step_s: float
    compare_every: int
    layout: Layout = field(init=False)
    step: int = 0
    sent: int = 0
    notices: list[tuple[float, str]] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)
    """Rank -> what is wrong with its next steps."""
    began_s: dict[str, float] = field(default_factory=dict)
    """Fault -> when it was first sent."""
    welcomed: int = 0

    def __post_init__(self) -> None:
        self.layout = Layout(self.world)

    @property
    def world(self) -> int:
        return self.hosts * PER_HOST

    def since(self, fault: str) -> float | None:
        """Seconds from the fault to the notice that names it; None: there is none yet."""
        named = [at_s for at_s, text in self.notices if SAYS[fault] in text]
        return named[0] - self.began_s[fault] if named and fault in self.began_s else None


class Host:
    """One agent's connection."""

    def __init__(self, load: Load, number: int) -> None:
        self.load, self.number = load, number
        self.ranks = list(range(number * PER_HOST, (number + 1) * PER_HOST))
        self.say: Say | None = None
        """While the coordinator listens."""

    async def live(self, session: aiohttp.ClientSession, url: str) -> None:
        """Connect, answer, and connect again."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.ws_connect(
                    url, headers={"Authorization": f"Bearer {TOKEN}"}, max_msg_size=0
                ) as socket:
                    hello = wire.AgentHello(run_id="bench", host=f"node-{self.number}", agent_pid=1)
                    await socket.send_bytes(wire.encode(hello))
                    await self._listen(socket)
            self.say = None
            await asyncio.sleep(0.1 + (self.number % 97) / 97)

    async def _listen(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async def say(message: wire.Upward) -> None:
            await socket.send_bytes(wire.encode(message))

        async for frame in socket:
            await self.hear(wire.decode_downward(frame.data), say)

    async def hear(self, message: object, say: Say) -> None:
        """What the coordinator says."""
        if isinstance(message, wire.Welcome):
            await say(self._introduction())
            self.say = say
            self.load.welcomed += 1
        elif isinstance(message, wire.ToRanks):
            await self._answer(say, message)

    async def _answer(self, say: Say, asked: wire.ToRanks) -> None:
        message = asked.message
        if isinstance(message, wire.Notice):
            self.load.notices.append((time.perf_counter(), message.text))
        if isinstance(message, wire.Fetch):
            (rank,) = asked.ranks
            table = wire.Fetched(request=message.request, observation=self._table(rank, message))
            await say(wire.HostReport(fetched=[table]))

    def _table(self, rank: int, asked: wire.Fetch) -> Observation:
        root = self._done(rank, asked.step).roots.get(asked.tensor_class, 0)
        body = Table(
            tensor_class=asked.tensor_class,
            root=root,
            names=[f"layer.{n}.weight" for n in range(NUM_TENSORS)],
            fingerprints=[root, *range(NUM_TENSORS - 1)],
            norms=[1.0] * NUM_TENSORS,
        )
        return Observation(rank=rank, step=asked.step, at_ns=clock.wall_ns(), body=body)

    def _introduction(self) -> wire.HostReport:
        world, now_ns = self.load.world, clock.wall_ns()
        entries = [TensorEntry(f"layer.{n}.weight", (4, 4), "float32", True, False, 0) for n in range(NUM_TENSORS)]
        backward = list(reversed(range(NUM_TENSORS)))
        census = Census(
            model=0,
            wrapper="",
            is_replicated=True,
            optimizers=["AdamW"],
            backward_order=backward,
            part=0,
            parts=1,
            entries=entries,
        )
        observations = []
        hellos = []
        for rank in self.ranks:
            hellos.append(
                wire.Hello(
                    run_id="bench",
                    rank=rank,
                    world_size=world,
                    host=f"node-{self.number}",
                    rank_pid=1000 + rank,
                    sidecar_pid=1,
                    metrics_address=f"h:{9400 + rank % 8}",
                    key=f"key of {rank}",
                )
            )
            about = Attached(
                pid=1000 + rank,
                host=f"node-{self.number}",
                world_size=world,
                local_rank=rank % 8,
                command=["train.py"],
                versions={},
            )
            observations += [Observation(rank=rank, step=0, at_ns=now_ns, body=body) for body in (about, census)]
        return wire.HostReport(joined=hellos, observations=observations)

    def _done(self, rank: int, step: int) -> StepDone:
        roots = self.load.layout.roots(rank, step) if step % self.load.compare_every == 0 else {}
        nonfinite: list[Nonfinite] = []
        fault = self.load.bad.get(rank)
        if fault == "parted" and roots:
            roots = {name: root ^ (name.startswith("parameters_") and "@cp#" in name) for name, root in roots.items()}
        if fault == "nan":
            nonfinite = [Nonfinite(where="gradient", name="layer.3.weight", nans=4, infs=0, numel=16)]
        return StepDone(
            seconds=0.9 + rank * 1e-6,
            phase_seconds={"data": 0.1 + rank * 1e-6, "forward": 0.3, "backward": 0.4},
            micro_steps=1,
            loss=2.0 + 1.0 / (step + 1) + rank * 1e-6,
            gradient_norm=0.7,
            learning_rate=1e-3,
            batch=step * 100_003 + rank,
            roots=roots,
            nonfinite=nonfinite,
            overhead_ratio=0.004,
            check_interval=self.load.compare_every,
            numbers={"clip.norm": 0.7, "batch.x.min": float(rank), "batch.x.max": 2.0, "memory.host_bytes": 1e9 + rank},
        )

    async def report(self, step: int) -> None:
        """One step of the host's ranks, as its agent says it."""
        if self.say is None:
            return
        now_ns, plain, alike = clock.wall_ns(), [], []
        for rank in self.ranks:
            done = self._done(rank, step)
            if done.nonfinite:
                plain.append(Observation(rank=rank, step=step, at_ns=now_ns, body=done))
            else:
                alike.append((rank, now_ns, done))
        if alike:
            plain.append(Observation(rank=alike[0][0], step=step, at_ns=now_ns, body=join(alike)))
        heartbeats = [(rank, wire.Heartbeat(step + 1, Phase.DATA, 0, now_ns)) for rank in self.ranks]
        for rank in self.ranks:
            fault = self.load.bad.get(rank)
            if fault == "nan" or (fault == "parted" and step % self.load.compare_every == 0):
                self.load.began_s.setdefault(fault, time.perf_counter())
        with contextlib.suppress(ConnectionError, RuntimeError):
            await self.say(wire.HostReport(heartbeats=heartbeats, observations=plain))
            self.load.sent += 1


class NatsHost(Host):
    """The same over NATS; what it says goes into the stream without waiting for the server's word."""

    async def live_there(self, address: str) -> None:
        """Connect, greet until there is a coordinator, and each new one."""
        names, name, who, newest = Subjects(RUN), host_name(f"node-{self.number}"), os.urandom(8), 0
        hello = wire.AgentHello(run_id=RUN, host=f"node-{self.number}", agent_pid=1)
        async with line_to(NatsPlace(address), name) as line:

            async def say(message: wire.Upward | Greeting) -> None:
                is_greeting = isinstance(message, Greeting)
                subject = names.hello(name) if is_greeting else names.said(name)
                with contextlib.suppress(*failures()):
                    await line.client.publish(subject, frames.encode(Said(who, message)))

            async def on_told(message: Any) -> None:
                nonlocal newest
                told = frames.decode_told(message.data)
                if told.token > newest:
                    newest, self.say = told.token, None
                    await say(Greeting(token=TOKEN, hello=hello))
                await self.hear(told.message, say)

            for told in (name, ALL):
                await line.client.subscribe(names.told(told), cb=on_told)
            await line.lost()


async def step_on(load: Load, hosts: list[Host], seconds: float) -> None:
    """Steps at their pace; the hosts' words are spread over each."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        for number, host in enumerate(hosts):
            await host.report(load.step)
            ahead_s = number / len(hosts) * load.step_s * 0.9 - (time.perf_counter() - began_s)
            if ahead_s > 0.005:
                await asyncio.sleep(ahead_s)
        load.step += 1
        await asyncio.sleep(max(0.0, load.step_s - (time.perf_counter() - began_s)))


def used_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 2**20


class Service:
    """The coordinator's process."""

    def __init__(self, folder: Path, world: int, nats: str = "") -> None:
        self.folder, self.world, self.nats = folder, world, nats
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        """Until it serves."""
        token = self.folder / "token"
        token.write_text(TOKEN)
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HOLTER")}
        environ |= {"HOLTER_NATS": self.nats} if self.nats else {}
        access = self.folder / "run" / "coordinator.json"
        access.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "holter.cli",
            "coordinator",
            "--run-dir",
            str(self.folder / "run"),
            "--run-id",
            "bench",
        ]
        command += [
            "--world-size",
            str(self.world),
            "--port",
            str(self.port),
            "--token-file",
            str(token),
            "--action",
            "notify",
        ]
        command += ["--idle-s", "120"]
        self.process = subprocess.Popen(command, env=environ, stderr=(self.folder / "log").open("ab"))  # noqa: ASYNC220
        while not access.exists():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            await asyncio.sleep(0.05)
        self.port = int(json.loads(access.read_text())["address"].rpartition(":")[2])

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()


async def scrape(port: int, every_s: float, seen: list[float]) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            began_s = time.perf_counter()
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    await answer.read()
                    seen.append(time.perf_counter() - began_s)
            await asyncio.sleep(every_s)


async def stand_idle(port: int, number: int, writers: list[asyncio.StreamWriter]) -> None:
    for _ in range(number):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)


async def until(what: str, condition: Any, deadline_s: float) -> float:
    began_s = time.perf_counter()
    while not condition():
        if time.perf_counter() - began_s > deadline_s:
            raise TimeoutError(what)
        await asyncio.sleep(0.01)
    return time.perf_counter() - began_s


@contextlib.contextmanager
def nats_server(arguments: argparse.Namespace, folder: Path) -> Iterator[Server | None]:
    """If it is wanted."""
    if not arguments.nats:
        yield None
        return
    server = Server(folder, "n0")
    server.start()
    server.wait()
    try:
        yield server
    finally:
        server.kill()


async def one_round(arguments: argparse.Namespace, hosts_number: int) -> dict[str, Any]:
    """Connect, measure, break, come back."""
    load = Load(hosts_number, arguments.step_s, arguments.compare_every)
    hosts = [(NatsHost if arguments.nats else Host)(load, number) for number in range(load.hosts)]
    found: dict[str, Any] = {"hosts": load.hosts, "ranks": load.world}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name, nats_server(arguments, Path(name)) as server:
        service = Service(Path(name), load.world, server.address if server is not None else "")
        await service.start()
        url = f"http://127.0.0.1:{service.port}/ingest"
        connector = aiohttp.TCPConnector(limit=0)
        scraped: list[float] = []
        writers: list[asyncio.StreamWriter] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            async with aiohttp.ClientSession(connector=connector) as session:
                tasks = [
                    asyncio.create_task(
                        host.live_there(service.nats) if isinstance(host, NatsHost) else host.live(session, url)
                    )
                    for host in hosts
                ]
                found["connect_s"] = await until("all hosts are welcome", lambda: load.welcomed >= load.hosts, 180)
                tasks += [
                    asyncio.create_task(scrape(service.port, arguments.scrape_s, scraped))
                    for _ in range(arguments.scrapers)
                ]
                await stand_idle(service.port, arguments.idle, writers)
                await step_on(load, hosts, 3 * load.step_s)
                before, own, sent, at_s = used_s(service.pid), time.process_time(), load.sent, time.perf_counter()
                served_s = used_s(server.pid) if server is not None else 0.0
                await step_on(load, hosts, arguments.seconds)
                elapsed_s, messages = time.perf_counter() - at_s, load.sent - sent
                found |= {
                    "messages_per_s": messages / elapsed_s,
                    "coordinator_cores": (used_s(service.pid) - before) / elapsed_s,
                    "coordinator_us_per_message": (used_s(service.pid) - before) / messages * 1e6,
                    "server_cores": (used_s(server.pid) - served_s) / elapsed_s if server is not None else None,
                    "generator_cores": (time.process_time() - own) / elapsed_s,
                    "resident_mb": resident_mb(service.pid),
                    "scrapes": len(scraped),
                    "slowest_scrape_s": max(scraped, default=None),
                    "idle_connections": len(writers),
                }
                found["named"] = await faults(load, hosts)
                load.bad.clear()
                # All come back at once: the coordinator dies and is started again.
                load.welcomed = 0
                service.end()
                at_s = time.perf_counter()
                await service.start()
                found["restart_s"] = time.perf_counter() - at_s
                await until("all hosts are back", lambda: load.welcomed >= load.hosts, 180)
                found["return_s"] = time.perf_counter() - at_s
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for writer in writers:
                writer.close()
            service.end()
    return found


async def faults(load: Load, hosts: list[Host]) -> dict[str, float | None]:
    """One fault after the other: seconds from its first record to the notice in the job's log; None: it was not named."""
    found: dict[str, float | None] = {}
    for fault, rank in (("parted", load.world // 2 + 3), ("nan", load.world // 3)):
        load.notices.clear()
        load.bad = {rank: fault}
        stepping = asyncio.create_task(step_on(load, hosts, 12.0))
        with contextlib.suppress(TimeoutError):
            await until(fault, lambda fault=fault: load.since(fault) is not None, 12.0)
        found[fault] = load.since(fault)
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        load.step += 1
    return found


async def hour(arguments: argparse.Namespace) -> dict[str, Any]:
    """3,600 steps as fast as they are taken; the memory at each quarter."""
    load = Load(HOUR_HOSTS, 0.0, arguments.compare_every)
    hosts = [Host(load, number) for number in range(load.hosts)]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        service = Service(Path(name), load.world)
        await service.start()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                tasks = [
                    asyncio.create_task(host.live(session, f"http://127.0.0.1:{service.port}/ingest")) for host in hosts
                ]
                await until("all hosts are welcome", lambda: load.welcomed >= load.hosts, 60)
                resident, began_s = [], time.perf_counter()
                for quarter in range(4):
                    for step in range(quarter * HOUR_STEPS // 4, (quarter + 1) * HOUR_STEPS // 4):
                        for host in hosts:
                            await host.report(step)
                        await asyncio.sleep(0)
                    await asyncio.sleep(1.0)
                    resident.append(resident_mb(service.pid))
                return {
                    "ranks": load.world,
                    "steps": HOUR_STEPS,
                    "took_s": time.perf_counter() - began_s,
                    "resident_mb": resident,
                }
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            service.end()


def lines(result: dict[str, Any], times: int) -> Iterator[str]:
    """For a person."""
    rounds = result["rounds"]
    first = rounds[0]
    yield f"{first['ranks']} ranks behind {first['hosts']} agents, a mesh of {len(AXES)} axes, one step a second; hosts are simulated, records and sockets are real"
    for one in rounds:
        yield (
            f"coordinator {one['coordinator_cores']:.3f} cores, {one['coordinator_us_per_message']:.0f} us a message at {one['messages_per_s']:.0f} a second"
            + ("" if one["server_cores"] is None else f", nats-server {one['server_cores']:.3f} cores")
            + f" (the generator {one['generator_cores']:.2f} cores); {one['resident_mb']:.0f} MB; beside {one['idle_connections']} idle connections"
            f" and {one['scrapes']} scrapes, the slowest {one['slowest_scrape_s'] or 0:.2f} s"
        )
        named = ", ".join(
            f"{fault} {'not named' if took is None else f'{took:.2f} s'}" for fault, took in one["named"].items()
        )
        yield f"cause to incident: {named}; all connected after {one['connect_s']:.1f} s, back after {one['return_s']:.1f} s ({one['restart_s']:.1f} s of it until the coordinator served)"
    if times > 1:
        cores = max(one["coordinator_cores"] for one in rounds) * times
        yield f"computed for {first['ranks'] * times} ranks: at most {cores:.2f} cores (messages grow with hosts, and judging with ranks)"
    took = sorted(took for one in rounds for took in one["named"].values() if took is not None)
    yield f"of {len(took)} incidents the slowest took {took[-1] if took else 0:.2f} s (wanted: {WANTED_S:g}); {WANTED_CORE:g} of a core are wanted"
    if "hour" in result:
        told = ", ".join(f"{mb:.0f}" for mb in result["hour"]["resident_mb"])
        yield f"a compressed hour ({result['hour']['steps']} steps of {result['hour']['ranks']} ranks in {result['hour']['took_s']:.0f} s): {told} MB at its quarters"


def main() -> int:
    """0: every fault was named, and the memory is flat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2048)
    parser.add_argument("--quarter", action="store_true", help="a quarter of the hosts; the rest is computed")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--compare-every", type=int, default=4, help="steps between two comparisons of replicas")
    parser.add_argument("--scrapers", type=int, default=10)
    parser.add_argument("--scrape-s", type=float, default=15.0)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--hour", action="store_true")
    parser.add_argument("--nats", action="store_true", help="behind a real nats-server (the hour is not)")
    parser.add_argument("--folder", default=None, help="where run directories are made")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
    number = arguments.hosts // 4 if arguments.quarter else arguments.hosts
    result: dict[str, Any] = {"rounds": [asyncio.run(one_round(arguments, number)) for _ in range(arguments.rounds)]}
    if arguments.hour:
        result["hour"] = asyncio.run(hour(arguments))
    times = 4 if arguments.quarter else 1
    sys.stdout.write(
        json.dumps(result) + "\n" if arguments.json else "".join(f"{line}\n" for line in lines(result, times))
    )
    are_named = all(took is not None for one in result["rounds"] for took in one["named"].values())
    resident = result.get("hour", {}).get("resident_mb", [1.0])
    return 0 if are_named and resident[-1] <= resident[0] * MAX_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
