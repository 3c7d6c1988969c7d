"""The coordinator's end of one agent's line: its messages become words of single ranks. Pure but for the receiver.

    HostReport ──▶ Receiver.connect (who joined), hear_host, goodbye, disconnect (who left)
    the line ends ──▶ Receiver.disconnect for each rank that spoke through it

A rank that has found another way meanwhile (its sidecar went round the agent) has a newer connection: what the end of this one means is for the
receiver to know.
"""

from collections.abc import Callable

import msgspec

from holter.transport import wire
from holter.transport.interface import Receiver, refusal


class HostLine:
    """Ranks that speak through one agent."""

    def __init__(self, receiver: Receiver, reachable: Callable[[str], str]) -> None:
        self.connections: dict[int, int] = {}
        """Rank -> number of its connection."""
        self._receiver, self._reachable = receiver, reachable
        """`reachable`: where a sidecar of that host serves its metrics, as seen from here."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that speak through it now."""
        return tuple(self.connections)

    def join(self, report: wire.HostReport, now_ns: int) -> tuple[list[int], list[wire.Released]]:
        """Take in who came with this report, before all else: who is there now, and what is to be told of those that cannot be taken."""
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
        """Take in the rest of it; True when it is urgent to judge."""
        is_urgent = self._receiver.hear_host(self.connections.keys(), report, now_ns)
        for rank in report.goodbyes:
            if rank in self.connections:
                self._receiver.goodbye(rank)
                is_urgent = True
        return is_urgent

    def leave(self, report: wire.HostReport, now_ns: int) -> list[int]:
        """Take in who left: those that were there."""
        return [rank for rank, is_closed in report.left if self.drop(rank, now_ns, is_closed=is_closed)]

    def drop(self, rank: int, now_ns: int, *, is_closed: bool) -> bool:
        """This rank does not speak through it any more; False if it did not."""
        connection = self.connections.pop(rank, None)
        if connection is not None:
            self._receiver.disconnect(rank, connection, now_ns, is_closed=is_closed)
        return connection is not None

    def forget(self, rank: int) -> None:
        """The rank has found another way: its newer connection counts, and no end of this one is told."""
        self.connections.pop(rank, None)

    def end(self, now_ns: int, *, is_closed: bool) -> None:
        """The agent's line ended."""
        for rank in self.ranks:
            self.drop(rank, now_ns, is_closed=is_closed)
