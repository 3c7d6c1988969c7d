"""Another host that is none: a network namespace, joined to ours by a pair of virtual interfaces."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from processes import kill_family

SCRIPT = Path(__file__).parent / "scripts" / "bits.py"
HOST = "node-b"


@dataclass
class OtherHost:
    """A namespace that is joined to ours by a link."""

    name: str
    ours: str
    """Our interface's address, theirs is the next."""
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)

    def ip(self, *words: str) -> None:
        """Run `ip`, which must work."""
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)

    def make(self) -> None:
        """Both ends up."""
        theirs = self.ours.removesuffix(".1") + ".2"
        self.ip("netns", "add", self.name)
        self.ip("link", "add", f"{self.name}a", "type", "veth", "peer", "name", f"{self.name}b", "netns", self.name)
        self.ip("addr", "add", f"{self.ours}/24", "dev", f"{self.name}a")
        self.ip("link", "set", f"{self.name}a", "up")
        self.ip("-n", self.name, "addr", "add", f"{theirs}/24", "dev", f"{self.name}b")
        self.ip("-n", self.name, "link", "set", "lo", "up")
        self.set_link("up")

    def set_link(self, state: str) -> None:
        """Their end: ours keeps its address, so that our own processes still find each other."""
        self.ip("-n", self.name, "link", "set", f"{self.name}b", state)

    def start(self, rank: int, environ: dict[str, str], directory: Path) -> None:
        """A rank here, or there."""
        command = [sys.executable, "-m", "holter", str(SCRIPT), "--steps", "1000000"]
        if rank:
            renamed = f'hostname {HOST} && exec "$@"'
            command = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", renamed, "sh", *command]
        place = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": f"{self.name}{'b' if rank else 'a'}"}
        with (directory / f"rank-{rank}.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=directory, env=environ | place, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True
            )
        self.ranks.append(process)

    def end(self) -> None:
        """Nothing of it is left."""
        for rank in self.ranks:
            if rank.poll() is None:
                kill_family(rank.pid)
            rank.wait(timeout=30)

    def unmake(self) -> None:
        """The link goes with the namespace."""
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True, timeout=30)


@pytest.fixture
def other_host() -> Iterator[OtherHost]:
    """Skipped, visibly, where namespaces cannot be made."""
    if missing := [program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    host = OtherHost(f"ho{os.getpid() % 100_000}", f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}.1")
    try:
        host.make()
        host.ip("netns", "exec", host.name, "unshare", "--uts", "true")
    except subprocess.CalledProcessError as error:
        host.unmake()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    yield host
    host.end()
    host.unmake()
