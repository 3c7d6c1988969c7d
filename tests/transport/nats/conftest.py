"""A real nats-server, coordinators as real processes, and ranks that are none."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.conftest import RUN_ID, TOKEN, SimulatedRank

from holter.transport.limits import UplinkSettings
from nats_servers import Server, next_port, program

HALT_TOKEN = "a halt's secret"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Skipped, visibly, where there is none."""
    if program() is None:
        pytest.skip("nats-server is not installed")
    made = Server(tmp_path, "n0")
    made.start()
    made.wait()
    yield made
    made.kill()


@dataclass
class Process:
    """`holter coordinator` by hand."""

    run_dir: Path
    process: subprocess.Popen[str]
    log: Path
    port: int
    host: str = "127.0.0.1"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stands_by(self) -> bool:
        """It is up, and another gives the orders."""
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(f"http://{self.host}:{self.port}/healthz", timeout=2) as found,
        ):
            about = json.loads(found.read())
            return bool(about.get("stands_by") and about.get("waits_for"))
        return False

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.process.kill()
        self.process.wait(timeout=10)


@dataclass
class Place:
    """One run on some servers."""

    directory: Path
    address: str
    run_id: str = RUN_ID
    env: dict[str, str] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    ranks: list[SimulatedRank] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.directory / self.run_id

    def coordinator(self, *words: str, world_size: int = 2, within: Sequence[str] = ()) -> Process:
        """Another process that may lead."""
        (self.directory / "token").write_text(TOKEN)
        number = len(self.processes)
        log = self.directory / f"coordinator-{number}.log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HOLTER")}
        environ |= {"HOLTER_NATS": self.address, "HOLTER_LINGER_S": "0", "HOLTER_MEMORY": "off"} | self.env
        command = [sys.executable, "-m", "holter.cli", "coordinator", "--run-dir", str(self.run_dir)]
        command += [
            "--run-id",
            self.run_id,
            "--world-size",
            str(world_size),
            "--token-file",
            str(self.directory / "token"),
        ]
        command += ["--port", str(port := next_port())]
        with log.open("w") as out:
            process = subprocess.Popen([*within, *command, *words], env=environ, stdout=out, stderr=out, text=True)
        self.processes.append(
            Process(
                self.run_dir,
                process,
                log,
                port,
                host=words[words.index("--host") + 1] if "--host" in words else "127.0.0.1",
            )
        )
        return self.processes[-1]

    def rank(self, rank: int, **options: Any) -> SimulatedRank:
        """A sidecar's uplink with a made-up rank behind it."""
        ways = {name: options.pop(name, "") for name in ("credentials", "agent")}
        settings = UplinkSettings(**ways)
        made = SimulatedRank(rank, 0, address=self.address, run_id=self.run_id, settings=settings, **options)
        self.ranks.append(made)
        return made

    def incidents(self) -> list[dict[str, Any]]:
        """As they are on the disk."""
        found = [json.loads(path.read_text()) for path in self.run_dir.glob("incidents/*/diagnosis.json")]
        return sorted(found, key=lambda one: one["id"])

    def leader(self) -> int:
        """Process id of who wrote coordinator.json last."""
        try:
            return int(json.loads((self.run_dir / "coordinator.json").read_text())["pid"])
        except (OSError, ValueError):
            return 0

    async def standby(self) -> Process:
        """Another one, that stands by."""
        made = self.coordinator()
        for _ in range(600):
            if await asyncio.to_thread(lambda: made.stands_by):
                return made
            await asyncio.sleep(0.1)
        raise AssertionError(made.log.read_text())

    async def end(self) -> None:
        await asyncio.gather(*(rank.uplink.close(0.0) for rank in self.ranks))
        for process in self.processes:
            process.end()


@pytest.fixture
async def place(tmp_path: Path, server: Server) -> AsyncIterator[Place]:
    made = Place(tmp_path, server.address)
    yield made
    await made.end()


@pytest.fixture
async def place_at(tmp_path: Path) -> AsyncIterator[Callable[..., Place]]:
    """On servers that a test names."""
    made: list[Place] = []

    def at(address: str, **options: Any) -> Place:
        made.append(Place(tmp_path, address, **options))
        return made[-1]

    yield at
    for one in made:
        await one.end()
