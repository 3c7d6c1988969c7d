"""How the ranks of a circle find each other: through the job's own store, over connections that are ours alone.

    every rank with children    listens, publishes its address, lets its children in
    then, if it has a parent    connects to it: all behind me are there
    rank 0                      has let everybody in, so everybody is there: welcome, from level to level

Nobody else may speak: whoever connects shows a secret that rank 0 put in the store; the door is closed when all are in. All of it happens in a
thread which ends when it is told to, or when the patience is over.
"""

import contextlib
import hmac
import ipaddress
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed.distributed_c10d as c10d

from holter import clock
from holter.rank.hold.agreement import Tree

PATIENCE_S = 120.0
TICK_S = 0.1
FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 1.0
"""Between two looks into the store; it is the job's, and serves thousands of ranks."""
MAX_WAITING = 64
"""Connections at the door that have not said who they are."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
WELCOME = b"holter: welcome\n"
_HELLO = struct.Struct("!8s32sI")
_MAGIC = b"holter 1"


@dataclass(frozen=True)
class PeerAddress:
    """A rank in its job."""

    tree: Tree
    address: str
    """Of the job's master, as this rank is told; loopback if all ranks are on one host."""
    life: int = 0
    """How often an elastic agent has started the job again: the store may outlive it."""


def job_store() -> Any:
    """A connection of our own to the job's store: another thread may be blocked in a question on the job's."""
    return c10d._get_default_store().clone()  # noqa: SLF001


@dataclass
class PeerJoin:
    """Joins once."""

    seat: PeerAddress
    store: Callable[[], Any]
    stop: threading.Event
    patience_s: float = PATIENCE_S
    sockets: list[socket.socket] = field(default_factory=list)
    """All that were opened, for a forked child to close."""
    num_turned_away: int = 0
    _until_s: float = 0.0

    def join(self) -> dict[int, socket.socket]:
        """A connection to the parent and one to each child, by their ranks.

        ConnectionResetError: another rank gave up. Anything else says who did not come, or what is wrong with the store or the network.
        """
        self._until_s = clock.monotonic_s() + self.patience_s
        tree, store, links = self.seat.tree, self.store(), {}
        if tree.parent is None:
            store.set(self._key("secret"), secrets.token_hex(16))
        secret = self._find(store, "secret", "rank 0's secret")
        if tree.children:
            links = self._let_in(store, secret)
        if tree.parent is not None:
            host, _, port = self._find(store, f"address/{tree.parent}", f"rank {tree.parent}").decode().rpartition(" ")
            links[tree.parent] = self._enter((host, int(port)), _HELLO.pack(_MAGIC, secret, tree.rank))
        for child in tree.children:
            links[child].sendall(WELCOME)
        for link in links.values():
            link.setblocking(False)
        return links

    def _let_in(self, store: Any, secret: bytes) -> dict[int, socket.socket]:
        host, told = own_address(self.seat.address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with self._keep(socket.socket(family, socket.SOCK_STREAM)) as listener:
            listener.bind((host, 0))
            listener.listen(len(self.seat.tree.children) + MAX_WAITING)
            store.set(self._key(f"address/{self.seat.tree.rank}"), f"{told} {listener.getsockname()[1]}")
            door = PeerListener(listener, secret, self.seat.tree.children, self._keep)
            while len(door.inside) < len(self.seat.tree.children):
                self._check(f"ranks {', '.join(map(str, door.missing()))}")
                door.look(TICK_S)
        door.close()
        self.num_turned_away = door.num_turned_away
        return door.inside

    def _enter(self, address: tuple[str, int], hello: bytes) -> socket.socket:
        try:
            left_s = max(1.0, self._until_s - clock.monotonic_s())
            link = self._keep(socket.create_connection(address, timeout=left_s))
        except OSError as error:
            raise ConnectionError(f"{address[0]}:{address[1]}, rank {self.seat.tree.parent}: {error}") from error
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(hello)
        link.settimeout(TICK_S)
        heard = b""
        while len(heard) < len(WELCOME):
            self._check(f"rank {self.seat.tree.parent}")
            with contextlib.suppress(TimeoutError):
                said = link.recv(len(WELCOME) - len(heard))
                if not said:
                    raise ConnectionResetError
                heard += said
        return link

    def _find(self, store: Any, name: str, whom: str) -> bytes:
        key, pause_s = self._key(name), FIRST_LOOK_S
        while not store.check([key]):
            self._check(whom)
            self.stop.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        return bytes(store.get(key))

    def _check(self, whom: str) -> None:
        if self.stop.is_set():
            raise ConnectionResetError
        if clock.monotonic_s() > self._until_s:
            raise TimeoutError(f"{whom} did not come within {self.patience_s:.0f} s")

    def _keep(self, opened: socket.socket) -> socket.socket:
        self.sockets.append(opened)
        return opened

    def _key(self, name: str) -> str:
        return f"holter/circle/{self.seat.life}/{name}"


class PeerListener:
    """Lets in those who know the secret and are expected; whoever says nothing keeps nobody else waiting."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        expected: range,
        keep: Callable[[socket.socket], socket.socket],
    ) -> None:
        self.inside: dict[int, socket.socket] = {}
        self.num_turned_away = 0
        self._listener, self._secret, self._expected, self._keep = listener, secret, expected, keep
        self._waiting: dict[int, tuple[socket.socket, bytearray]] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def missing(self) -> list[int]:
        """Who is not inside yet."""
        return [rank for rank in self._expected if rank not in self.inside]

    def look(self, seconds: float) -> None:
        """Open to whoever comes within this time."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._waiting:
                self._hear(descriptor)

    def close(self) -> None:
        """To those who are still outside."""
        for descriptor in list(self._waiting):
            self._turn_away(descriptor)

    def _accept(self) -> None:
        try:
            came = self._keep(self._listener.accept()[0])
        except OSError:
            # It has gone again.
            return
        came.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        came.setblocking(False)
        if len(self._waiting) >= MAX_WAITING:
            self._turn_away(next(iter(self._waiting)))
        self._waiting[came.fileno()] = came, bytearray()
        self._poll.register(came, select.POLLIN)

    def _hear(self, descriptor: int) -> None:
        came, heard = self._waiting[descriptor]
        try:
            said = came.recv(_HELLO.size - len(heard))
        except OSError:
            said = b""
        heard += said
        if not said:
            self._turn_away(descriptor)
        elif len(heard) == _HELLO.size:
            magic, secret, rank = _HELLO.unpack(heard)
            is_known = magic == _MAGIC and hmac.compare_digest(secret, self._secret)
            if not is_known or rank not in self._expected or rank in self.inside:
                self._turn_away(descriptor)
                return
            self._poll.unregister(descriptor)
            self.inside[rank] = self._waiting.pop(descriptor)[0]

    def _turn_away(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._waiting.pop(descriptor)[0].close()
        self.num_turned_away += 1


def own_address(master: str) -> tuple[str, str]:
    """Where to listen, and what to tell the others: the interface that reaches the job's master."""
    family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        # Nothing is sent: the kernel chooses the way.
        asking.connect(target)
        found: str = asking.getsockname()[0]
    if ipaddress.ip_address(found).is_loopback and master not in LOOPBACK:
        # The master's own host, whose name for itself is loopback; the others reach it by its name.
        return "::" if family == socket.AF_INET6 else "0.0.0.0", master  # noqa: S104
    return found, found
