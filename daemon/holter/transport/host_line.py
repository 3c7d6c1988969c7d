"""The coordinator's end of an agent's connection: it splits the agent's messages into those of single ranks.

    HostReport ──▶ Receiver.connect (who joined), hear_host, goodbye, disconnect (who left)
    the connection ends ──▶ Receiver.disconnect for each rank that spoke through it

It does no I/O. A rank whose sidecar has gone round the agent meanwhile has a newer connection; the receiver knows then
to ignore the end of this one.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from holter.transport import wire
from holter.transport.interface import Receiver, refusal
from holter.transport.questions import Questions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostHeard:
    """What a listener has to do about a report that was taken in."""

    came: list[int]
    """Ranks that speak through this line from now on."""
    refused: list[wire.Released]
    """To be told."""
    goodbyes: list[int] = field(default_factory=list)
    """Ranks that have said everything: to be let go when nobody needs them any more."""
    left: list[int] = field(default_factory=list)
    is_urgent: bool = False
    """To judge."""


class HostLine:
    """The ranks that speak through one agent."""

    def __init__(self, receiver: Receiver, reachable: Callable[[str], str]) -> None:
        self.connections: dict[int, int] = {}
        """Number of each rank's connection."""
        self._receiver, self._reachable = receiver, reachable
        """`reachable` turns the address at which a sidecar of that host serves its metrics into one that works from
        here."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that speak through the agent now."""
        return tuple(self.connections)

    def take(self, report: wire.HostReport, num_bytes: int, questions: Questions, now_ns: int) -> HostHeard:
        """Take in a report: who came with it before all else, who left last."""
        came, refused = self.join(report.joined, now_ns)
        if self.ranks and not self._receiver.has_room(self.ranks[0], num_bytes // len(self.ranks), now_ns):
            return HostHeard(came, refused)
        for fetched in report.fetched:
            questions.answer(self.connections, fetched)
        is_urgent = self._receiver.hear_host(self.connections.keys(), report, now_ns)
        goodbyes = [rank for rank in report.goodbyes if rank in self.connections]
        for rank in goodbyes:
            self._receiver.goodbye(rank)
        left = [rank for rank, is_closed in report.left if self.drop(rank, now_ns, is_closed=is_closed)]
        return HostHeard(came, refused, goodbyes, left, is_urgent=bool(is_urgent or goodbyes or left))

    def join(self, hellos: Iterable[wire.Hello], now_ns: int) -> tuple[list[int], list[wire.Released]]:
        """Take in who came: who is there now, and what is to be told of those that cannot be taken."""
        came, refused = [], []
        for hello in hellos:
            reason = refusal(hello, self._receiver)
            if reason is not None:
                logger.warning("turned the sidecar of rank %d away: %s", hello.rank, reason)
                refused.append(wire.Released(rank=hello.rank, code=wire.REFUSED, reason=reason))
                continue
            known = msgspec.structs.replace(hello, metrics_address=self._reachable(hello.metrics_address))
            self.connections[hello.rank] = self._receiver.connect(known, now_ns)
            came.append(hello.rank)
        return came, refused

    def drop(self, rank: int, now_ns: int, *, is_closed: bool) -> bool:
        """End a rank's connection through this agent; False if it had none."""
        connection = self.connections.pop(rank, None)
        if connection is not None:
            self._receiver.disconnect(rank, connection, now_ns, is_closed=is_closed)
        return connection is not None

    def forget(self, rank: int) -> None:
        """Drop a rank that has found another way: its newer connection counts, and the end of this one is not reported."""
        self.connections.pop(rank, None)

    def end(self, now_ns: int, *, is_closed: bool) -> None:
        """End the connections of all ranks, because the agent's connection ended."""
        for rank in self.ranks:
            self.drop(rank, now_ns, is_closed=is_closed)
