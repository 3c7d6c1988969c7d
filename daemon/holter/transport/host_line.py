"""The coordinator's end of an agent's connection: it splits the agent's messages into those of single ranks.

    HostReport ──▶ Receiver.connect (who joined), hear_host, goodbye, disconnect (who left)
    the connection ends ──▶ Receiver.disconnect for each rank that spoke through it

It does no I/O. A rank whose sidecar has gone round the agent meanwhile has a newer connection; the receiver knows then
to ignore the end of this one.
"""

from collections.abc import Callable

import msgspec

from holter.transport import wire
from holter.transport.interface import Receiver, refusal


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

    def join(self, report: wire.HostReport, now_ns: int) -> tuple[list[int], list[wire.Released]]:
        """Take in the sidecars that came with a report, before anything else in it.

        Returns the ranks that came, and the messages about those that were refused.
        """
        came, refused = [], []
        for hello in report.joined:
            reason = refusal(hello, self._receiver)
            if reason is not None:
                refused.append(wire.Released(rank=hello.rank, code=wire.REFUSED, reason=reason))
                continue
            known = msgspec.structs.replace(hello, metrics_address=self._reachable(hello.metrics_address))
            self.connections[hello.rank] = self._receiver.connect(known, now_ns)
            came.append(hello.rank)
        return came, refused

    def hear(self, report: wire.HostReport, now_ns: int) -> bool:
        """Take in the rest of a report; return whether something in it is urgent."""
        is_urgent = self._receiver.hear_host(self.connections.keys(), report, now_ns)
        for rank in report.goodbyes:
            if rank in self.connections:
                self._receiver.goodbye(rank)
                is_urgent = True
        return is_urgent

    def leave(self, report: wire.HostReport, now_ns: int) -> list[int]:
        """Take in which sidecars left; return the ranks that were connected."""
        return [rank for rank, is_closed in report.left if self.drop(rank, now_ns, is_closed=is_closed)]

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
