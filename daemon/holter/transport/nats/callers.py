"""The senders that speak to the coordinator over NATS, by name: ranks' sidecars, and hosts' agents for all of theirs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from holter.transport.host_line import HostLine
from holter.transport.nats.frames import Said

MAX_EARLY = 1000
"""Number of messages kept of a sender that has not introduced itself."""
MAX_EARLY_IN_ALL = 50_000


@dataclass
class Caller:
    """A rank's sidecar, or a host's agent."""

    who: bytes
    server: str
    heard_s: float
    connection: int = 0
    """Number of the rank's connection."""
    host: HostLine | None = None
    """For an agent: the ranks that speak through it; None for a sidecar."""
    num_unheard: int = 0
    is_gone: bool = False

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the ranks that it speaks for; `name` is its own name."""
        return (int(name),) if self.host is None else self.host.ranks


@dataclass
class Callers:
    """All senders."""

    by_name: dict[str, Caller] = field(default_factory=dict)
    routes: dict[int, str] = field(default_factory=dict)
    """For each rank, the name that it is reached by: its own or its agent's; the newest way wins."""

    def route(self, rank: int, name: str) -> None:
        """Note that this rank now speaks by this name, and no longer by another one."""
        former = self.routes.get(rank)
        self.routes[rank] = name
        if former is None or former == name or (caller := self.by_name.get(former)) is None:
            return
        if caller.host is not None:
            caller.host.forget(rank)
        else:
            caller.is_gone = True

    def drop_route(self, rank: int, name: str) -> None:
        """Note that it no longer speaks by this name."""
        if self.routes.get(rank) == name:
            del self.routes[rank]

    def reached(self, rank: int) -> tuple[str, Caller] | None:
        """Return the name and sender by which a rank can be reached; None if it cannot."""
        name = self.routes.get(rank)
        caller = self.by_name.get(name) if name is not None else None
        return (name, caller) if name is not None and caller is not None and not caller.is_gone else None

    def quiet(self, since_s: float) -> Iterator[str]:
        """Yield the names of senders that have been silent since then."""
        for name, caller in self.by_name.items():
            if not caller.is_gone and caller.heard_s < since_s:
                yield name

    def apart(self, ranks: Sequence[int]) -> tuple[list[str], dict[str, list[int]]]:
        """Split ranks into the names that are told directly, and the ranks of each agent."""
        straight: list[str] = []
        by_agent: dict[str, list[int]] = {}
        for rank in ranks:
            name = self.routes.get(rank, str(rank))
            caller = self.by_name.get(name)
            if caller is None or caller.host is None:
                straight.append(name)
            else:
                by_agent.setdefault(name, []).append(rank)
        return straight, by_agent


@dataclass
class Early:
    """Messages of senders that have not introduced themselves yet."""

    messages: dict[str, list[tuple[Said, int]]] = field(default_factory=dict)
    num: int = 0
    num_lost: int = 0

    def keep(self, name: str, said: Said, num_bytes: int) -> None:
        """Keep a message until its sender has introduced itself."""
        kept = self.messages.setdefault(name, [])
        if len(kept) >= MAX_EARLY or self.num >= MAX_EARLY_IN_ALL:
            self.num_lost += 1
            return
        kept.append((said, num_bytes))
        self.num += 1

    def take(self, name: str) -> list[tuple[Said, int]]:
        """Return the messages of a sender that has introduced itself now."""
        kept = self.messages.pop(name, [])
        self.num -= len(kept)
        return kept
