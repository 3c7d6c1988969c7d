"""Lets ranks that apply shards of one model agree before each step whether all of it is finite, over connections of their own.

    main thread     gives its word, and waits for the answer: never longer than two seconds, and not at all until the first answer has come
    our thread      connects, then passes words up and answers down (`agreement`), also while the main thread is busy

We use no collective: the script's own sequence of them is unchanged, and a rank that does not step holds nobody up. A rank that misses the
deadline goes on without an answer, and an answer that comes too late is dropped. After three misses in a row the log says which ranks were
waited for, and the agreement ends; it also ends, without a message, when a connection ends, because others find out why. Steps before the
first answer are not agreed on: from the first step of a job until all ranks are connected, 0.05 s later with 8 ranks on one host.

How they connect, through the job's own store:

    every rank with children    listens, publishes its address, accepts its children
    then, if it has a parent    connects to it, which shows that all ranks below this one are there
    rank 0                      has accepted its children, so everybody is there: it sends a welcome, which is passed on from level to level

Strangers are kept out: whoever connects shows a secret that rank 0 put in the store, and the listener is closed when all are connected.

Approximate cost, from the word to the answer when all ranks arrive together: 70 us with 2 ranks, 0.5 ms with 8, of which 15 to 35 us are the
main thread's own; medians of 2,800 rounds between processes on one host whose two cores were busy with other work too. A level of the tree adds
two trips over the network. The wait is counted as waiting, not as overhead; it is mostly for the slowest host to arrive, for which the next
collective would wait too. A host that runs ahead of its device waits for the other hosts here, never for a device.
"""

import atexit
import contextlib
import hmac
import ipaddress
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed.distributed_c10d as c10d

from holter import clock
from holter.rank.hold.agreement import AgreementRounds, Round, Sending, Tree, Word
from holter.threads import without_signals

PATIENCE_S = 120.0
TICK_S = 0.1
FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 1.0
"""Shortest and longest time between two looks into the job's store, which serves thousands of ranks."""
MAX_WAITING = 64
"""Number of open connections that have not said yet who they are."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
WELCOME = b"holter: welcome\n"
_HELLO = struct.Struct("!8s32sI")
_MAGIC = b"holter 1"
WAIT_S = 2.0
MAX_MISSES = 3
"""Number of missed answers in a row after which the agreement ends."""
JOIN_S = 2.0
"""Seconds that the end of the interpreter waits for our thread."""
_WORD = struct.Struct("!qqq")
_FINE = -1


@dataclass(frozen=True)
class PeerAddress:
    """A rank's place in its job, and how it reaches the others."""

    tree: Tree
    master: str
    """Address of the job's master, as this rank was given it; loopback if all ranks are on one host."""
    life: int = 0
    """How often an elastic agent has restarted the job, because the store may outlive a restart."""


def job_store() -> Any:
    """Return a connection of our own to the job's store: another thread may be blocked in a question on the job's own."""
    return c10d._get_default_store().clone()  # noqa: SLF001


@dataclass
class PeerConnector:
    """Connects one rank to its parent and its children in the tree, once."""

    own: PeerAddress
    store: Callable[[], Any]
    stop: threading.Event
    patience_s: float = PATIENCE_S
    sockets: list[socket.socket] = field(default_factory=list)
    """All sockets that were opened, so that a forked child can close them."""
    num_turned_away: int = 0
    _until_s: float = 0.0

    def connect(self) -> dict[int, socket.socket]:
        """Connect to the parent and to each child, and return the connections by rank.

        ConnectionResetError means that another rank gave up. Any other exception says which rank did not come, or what is wrong with the
        store or the network.
        """
        self._until_s = clock.monotonic_s() + self.patience_s
        tree, store, links = self.own.tree, self.store(), {}
        if tree.parent is None:
            store.set(self._key("secret"), secrets.token_hex(16))
        secret = self._find(store, "secret", "rank 0's secret")
        if tree.children:
            links = self._accept_children(store, secret)
        if tree.parent is not None:
            host, _, port = self._find(store, f"address/{tree.parent}", f"rank {tree.parent}").decode().rpartition(" ")
            links[tree.parent] = self._connect_to_parent((host, int(port)), _HELLO.pack(_MAGIC, secret, tree.rank))
        for child in tree.children:
            links[child].sendall(WELCOME)
        for link in links.values():
            link.setblocking(False)
        return links

    def _accept_children(self, store: Any, secret: bytes) -> dict[int, socket.socket]:
        host, told = own_address(self.own.master)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with self._keep(socket.socket(family, socket.SOCK_STREAM)) as listener:
            listener.bind((host, 0))
            listener.listen(len(self.own.tree.children) + MAX_WAITING)
            store.set(self._key(f"address/{self.own.tree.rank}"), f"{told} {listener.getsockname()[1]}")
            incoming = PeerListener(listener, secret, self.own.tree.children, self._keep)
            while len(incoming.accepted) < len(self.own.tree.children):
                self._check(f"ranks {', '.join(map(str, incoming.missing()))}")
                incoming.look(TICK_S)
        incoming.close()
        self.num_turned_away = incoming.num_turned_away
        return incoming.accepted

    def _connect_to_parent(self, address: tuple[str, int], hello: bytes) -> socket.socket:
        try:
            left_s = max(1.0, self._until_s - clock.monotonic_s())
            link = self._keep(socket.create_connection(address, timeout=left_s))
        except OSError as error:
            raise ConnectionError(f"{address[0]}:{address[1]}, rank {self.own.tree.parent}: {error}") from error
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(hello)
        link.settimeout(TICK_S)
        heard = b""
        while len(heard) < len(WELCOME):
            self._check(f"rank {self.own.tree.parent}")
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
        return f"holter/shards/{self.own.life}/{name}"


class PeerListener:
    """Accepts the expected ranks, which know the secret; a connection that sends nothing does not keep the others waiting."""

    def __init__(
        self, listener: socket.socket, secret: bytes, expected: range, keep: Callable[[socket.socket], socket.socket]
    ) -> None:
        self.accepted: dict[int, socket.socket] = {}
        self.num_turned_away = 0
        self._listener, self._secret, self._expected, self._keep = listener, secret, expected, keep
        self._waiting: dict[int, tuple[socket.socket, bytearray]] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def missing(self) -> list[int]:
        """Return the ranks that have not connected yet."""
        return [rank for rank in self._expected if rank not in self.accepted]

    def look(self, seconds: float) -> None:
        """Wait at most this long for connections or what they send, and handle them."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._waiting:
                self._hear(descriptor)

    def close(self) -> None:
        """Close the connections that have not said who they are."""
        for descriptor in list(self._waiting):
            self._turn_away(descriptor)

    def _accept(self) -> None:
        try:
            came = self._keep(self._listener.accept()[0])
        except OSError:
            # The connection has been closed again.
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
            if not is_known or rank not in self._expected or rank in self.accepted:
                self._turn_away(descriptor)
                return
            self._poll.unregister(descriptor)
            self.accepted[rank] = self._waiting.pop(descriptor)[0]

    def _turn_away(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._waiting.pop(descriptor)[0].close()
        self.num_turned_away += 1


def own_address(master: str) -> tuple[str, str]:
    """Return the address to listen on and the one to publish, both of the interface that reaches the job's master."""
    family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        # Nothing is sent: the kernel only chooses the route.
        asking.connect(target)
        found: str = asking.getsockname()[0]
    if ipaddress.ip_address(found).is_loopback and master not in LOOPBACK:
        # This is the master's own host, which resolves its own name to loopback; the others reach it by that name.
        return "::" if family == socket.AF_INET6 else "0.0.0.0", master  # noqa: S104
    return found, found


class ShardPeers:
    """One rank's part in the agreement; it connects when it is first asked."""

    def __init__(self, own: PeerAddress, store: Callable[[], Any] = job_store, wait_s: float = WAIT_S) -> None:
        self.waited_s = 0.0
        """Seconds that this rank has waited for answers so far."""
        self.is_over = False
        self.loss = ""
        """Why this rank's part ended; empty if another rank reports it."""
        self._own = own
        self._wait_s = wait_s
        self._rounds = AgreementRounds(own.tree)
        self._round = Round(-1, 0)
        self._num_misses = 0
        self._links: dict[int, socket.socket] = {}
        self._stop = threading.Event()
        self._connector = PeerConnector(own, store, self._stop)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        """Whether an answer has come: from then on all ranks are known to take part."""
        return self._rounds.answer is not None

    def agree(self, step: int, bad_step: int | None) -> int | None:
        """Return the first step that any rank has reported as not finite before this one is applied; None if none is known."""
        with self._changed:
            if self.is_over:
                return bad_step
            if self._thread is None:
                self._begin()
            self._round = Round(step, self._round.turn + 1 if step == self._round.step else 0)
            self._hear(self._own.tree.rank, Word(self._round, bad_step))
            # With a bad step of our own we need no answer, and the others get theirs without us.
            if bad_step is not None or not self.has_begun:
                return bad_step
            return self._wait()

    def leave(self) -> None:
        """Leave for good, so that no rank waits for this one any more."""
        self._stop.set()
        with self._changed:
            self._end()

    def _wait(self) -> int | None:
        asked, began = self._round, clock.monotonic_s()
        self._changed.wait_for(lambda: self.is_over or self._rounds.answered(asked) is not None, self._wait_s)
        self.waited_s += clock.monotonic_s() - began
        answer = self._rounds.answered(asked)
        if answer is not None:
            self._num_misses = 0
            return answer.bad_step
        self._num_misses += 1
        if self._num_misses == MAX_MISSES and not self.is_over:
            whom = _ranks(self._rounds.awaited(asked))
            self.loss = f"no word of {whom} within {self._wait_s:.0f} s, at {MAX_MISSES} steps in a row"
            self._end()
        return None

    def _begin(self) -> None:
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._finish)
        self._thread = threading.Thread(target=self._run, name="holter-shards", daemon=True)
        with without_signals():
            self._thread.start()

    def _run(self) -> None:
        try:
            links = self._connector.connect()
            with self._changed:
                self._links = links
            with contextlib.suppress(OSError):
                self._listen(links)
        except ConnectionResetError:
            # The rank that gave up has said why.
            pass
        except Exception as error:  # noqa: BLE001  a store and peers are other processes'
            self.loss = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._end()
            self._close()

    def _listen(self, links: dict[int, socket.socket]) -> None:
        ranks = {link.fileno(): rank for rank, link in links.items()}
        heard = {rank: bytearray() for rank in links}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while not self.is_over:
            for descriptor, _ in poll.poll():
                rank = ranks[descriptor]
                said = links[rank].recv(4096)
                if not said:
                    return
                heard[rank] += said
                with self._changed:
                    for word in _words(heard[rank]):
                        self._hear(rank, word)

    def _hear(self, sender: int, word: Word) -> None:
        before = self._rounds.answer
        for sending in self._rounds.hear(sender, word):
            self._send(sending)
        if self._rounds.answer is not before:
            self._changed.notify_all()

    def _send(self, sending: Sending) -> None:
        link = self._links.get(sending.to)
        if link is None:
            return
        (step, turn), bad_step = sending.word
        try:
            is_sent = link.send(_WORD.pack(step, turn, _FINE if bad_step is None else bad_step)) == _WORD.size
        except OSError:
            is_sent = False
        if not is_sent:
            self._end()

    def _end(self) -> None:
        """End the agreement: wake all threads here and at the other ends; our thread then closes the sockets."""
        self.is_over = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()

    def _close(self) -> None:
        for each in self._connector.sockets:
            with contextlib.suppress(OSError):
                each.close()

    def _forget(self) -> None:
        """Close a forked child's copies of the rank's connections, without telling the peers, and make a new lock: the holder may not exist here."""
        self._close()
        self.is_over, self._links, self._thread, self._changed = True, {}, None, threading.Condition()

    def _finish(self) -> None:
        self.leave()
        if self._thread is not None:
            self._thread.join(JOIN_S)


def _words(heard: bytearray) -> list[Word]:
    """Take all complete words out of what was received; the rest stays."""
    num_bytes = len(heard) - len(heard) % _WORD.size
    words = [
        Word(Round(step, turn), None if bad_step == _FINE else bad_step)
        for step, turn, bad_step in _WORD.iter_unpack(heard[:num_bytes])
    ]
    del heard[:num_bytes]
    return words


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
