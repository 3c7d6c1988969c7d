"""Hosts that are none: network namespaces on one bridge, each with an address of its own; links are cut, and single ways between two."""

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import Self


class NoNetworkError(Exception):
    """Namespaces cannot be made here."""


@dataclass
class Network:
    """`with Network(["a", "b"]) as network`; `network.address["a"]`, `network.within("a")` before a command."""

    names: list[str]
    stem: str = field(default_factory=lambda: f"h{os.getpid() % 10_000}")
    address: dict[str, str] = field(default_factory=dict)
    gateway: str = ""

    def __enter__(self) -> Self:
        if shutil.which("ip") is None:
            raise NoNetworkError("ip is not installed")
        base = f"10.{150 + os.getpid() % 40}.{os.getpid() // 40 % 250}"
        self.gateway = f"{base}.1"
        try:
            self._ip("link", "add", f"{self.stem}br", "type", "bridge")
            self._ip("addr", "add", f"{self.gateway}/24", "dev", f"{self.stem}br")
            self._ip("link", "set", f"{self.stem}br", "up")
            for number, name in enumerate(self.names):
                self.address[name] = f"{base}.{number + 2}"
                self._add(number, name)
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise NoNetworkError(error.stderr.strip()) from None
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False, capture_output=True, timeout=30)
        subprocess.run(["ip", "link", "del", f"{self.stem}br"], check=False, capture_output=True, timeout=30)

    def within(self, name: str) -> list[str]:
        """Words before a command that is to run there."""
        return ["ip", "netns", "exec", self._space(name)]

    def cut(self, name: str) -> None:
        """Silence, and no reset."""
        self._ip("-n", self._space(name), "link", "set", "up0", "down")

    def join(self, name: str) -> None:
        """The link is up again."""
        self._ip("-n", self._space(name), "link", "set", "up0", "up")

    def part(self, one: str, other: str) -> None:
        """These two do not reach each other; all others reach both."""
        self._ip("-n", self._space(one), "route", "add", "blackhole", f"{self.address[other]}/32")

    def unite(self, one: str, other: str) -> None:
        """They do again."""
        self._ip("-n", self._space(one), "route", "del", "blackhole", f"{self.address[other]}/32")

    def _space(self, name: str) -> str:
        return f"{self.stem}-{name}"

    def _add(self, number: int, name: str) -> None:
        space, ours = self._space(name), f"{self.stem}v{number}"
        self._ip("netns", "add", space)
        self._ip("link", "add", ours, "type", "veth", "peer", "name", "up0", "netns", space)
        self._ip("link", "set", ours, "master", f"{self.stem}br", "up")
        self._ip("-n", space, "addr", "add", f"{self.address[name]}/24", "dev", "up0")
        self._ip("-n", space, "link", "set", "lo", "up")
        self._ip("-n", space, "link", "set", "up0", "up")

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)
