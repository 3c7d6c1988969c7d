"""Real nats-servers on free ports of loopback, or wherever a test wants them; stopped at the end."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from free_port import FIRST, NUM

DEADLINE_S = 30.0
_taken: set[int] = set()


def program() -> str | None:
    """Debian puts it where only root looks."""
    return shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")


def next_port() -> int:
    """A free one, and none that this process was told before: whoever was may not have bound it yet."""
    for port in range(FIRST + os.getpid() * 7 % NUM, FIRST + 2 * NUM):
        own = FIRST + (port - FIRST) % NUM
        if own in _taken:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", own)):
            _taken.add(own)
            return own
    raise OSError("no port is free")


@dataclass
class Server:
    """One server."""

    directory: Path
    name: str
    host: str = "127.0.0.1"
    port: int = 0
    extra: str = ""
    """More of its configuration."""
    within: list[str] = field(default_factory=list)
    """Words before the command: `ip netns exec x`."""
    process: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        self.port = self.port or next_port()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def address(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def log(self) -> str:
        return (self.directory / f"{self.name}.log").read_text()

    def start(self) -> None:
        config = self.directory / f"{self.name}.conf"
        config.write_text(
            f'server_name: {self.name}\nlisten: "{self.host}:{self.port}"\n'
            f'jetstream {{ store_dir: "{self.directory / self.name}" }}\nmax_payload: 8MB\nwrite_deadline: "5s"\n'
            f"{self.extra}\n"
        )
        found = program()
        assert found is not None
        with (self.directory / f"{self.name}.log").open("a") as log:
            self.process = subprocess.Popen([*self.within, found, "-c", config], stdout=log, stderr=log, text=True)

    def wait(self) -> None:
        """Until it takes connections."""
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            assert self.process is not None
            assert self.process.poll() is None, self.log
            if self.within:
                if "Server is ready" in self.log:
                    return
            else:
                with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
                    return
            time.sleep(0.05)
        raise AssertionError(self.log)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Whatever it is doing."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(timeout=10)


def cluster_of(directory: Path, hosts: list[str], within: list[list[str]] | None = None) -> list[Server]:
    """As many servers as hosts, which know each other; started, and agreed on a leader."""
    routes = [next_port() for _ in hosts]
    named = ", ".join(f'"nats://{host}:{port}"' for host, port in zip(hosts, routes, strict=True))
    servers = []
    for number, (host, port) in enumerate(zip(hosts, routes, strict=True)):
        extra = f'cluster {{ name: c, listen: "{host}:{port}", no_advertise: true, routes: [{named}] }}\nping_interval: "2s"'
        server = Server(directory, f"n{number}", host, extra=extra, within=(within or [[] for _ in hosts])[number])
        server.start()
        servers.append(server)
    for server in servers:
        server.wait()
    until = time.monotonic() + DEADLINE_S
    while not any("JetStream cluster new metadata leader" in server.log for server in servers):
        assert time.monotonic() < until, "the cluster has no leader"
        time.sleep(0.1)
    return servers
