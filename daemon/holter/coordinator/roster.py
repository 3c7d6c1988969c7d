"""Who is there: ranks, their processes and sidecars, and where each was last seen. Pure: time is an argument.

hello -> connected --goodbye--> ended
            |  ^
      lost  v  | hello again: the same rank
           gone
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holter.exporters.snapshot import RankSnapshot, StepHistogram, add_nonfinite
from holter.records import Exited, Observation, Phase, SightLost, StepDone, Where
from holter.transport.wire import Heartbeat, Hello

State = Literal["connected", "gone", "ended"]


@dataclass
class Member:
    """One rank, as last heard of."""

    hello: Hello
    connection: int
    """Number of its newest connection; an older one that ends says nothing."""
    is_connected: bool = True
    has_said_goodbye: bool = False
    exited: Exited | None = None
    heartbeat: Heartbeat | None = None
    last_progress_ns: int | None = None
    last_heard_ns: int = 0
    step: int | None = None
    phase: Phase | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    overhead_ratio: float | None = None
    dropped: int = 0
    sight_lost: dict[str, int] = field(default_factory=dict)
    """What this rank's holter cannot see, and how much was lost."""
    step_times: StepHistogram = field(default_factory=StepHistogram)
    nonfinite: Mapping[Where, int] = field(default_factory=dict)

    @property
    def state(self) -> State:
        """Of the sidecar: an exited rank's sidecar is not lost, it has nothing more to do."""
        if self.has_said_goodbye or (self.exited is not None and not self.is_connected):
            return "ended"
        return "connected" if self.is_connected else "gone"


class Roster:
    """All ranks that ever said Hello."""

    def __init__(self, world_size: int = 0) -> None:
        self.world_size = world_size
        self.members: dict[int, Member] = {}
        self.sidecars_lost = 0
        """Connections that ended without Goodbye."""
        self.duplicates = 0
        """Times that a rank came from a second process while the first still lived."""
        self._connections = 0

    def refusal(self, hello: Hello) -> str | None:
        """Why this sidecar cannot be taken in, if it cannot."""
        if self.world_size and hello.world_size != self.world_size:
            return f"world size is {self.world_size} here, {hello.world_size} there"
        if not 0 <= hello.rank < hello.world_size:
            return f"rank {hello.rank} is outside 0..{hello.world_size - 1}"
        return None

    def connect(self, hello: Hello, now_ns: int) -> int:
        """A sidecar is there, perhaps again; returns the number of its connection."""
        self.world_size = hello.world_size
        self._connections += 1
        known = self.members.get(hello.rank)
        if known is None or known.hello.rank_pid != hello.rank_pid or known.hello.host != hello.host:
            if known is not None and known.state == "connected":
                self.duplicates += 1
            self.members[hello.rank] = Member(hello, self._connections, last_heard_ns=now_ns)
        else:
            known.hello, known.connection = hello, self._connections
            known.is_connected, known.has_said_goodbye = True, False
        return self._connections

    def disconnect(self, rank: int, connection: int) -> None:
        """A connection ended; without Goodbye its sidecar is lost."""
        member = self.members[rank]
        if member.connection != connection:
            return
        member.is_connected = False
        if not member.has_said_goodbye:
            self.sidecars_lost += 1

    def goodbye(self, rank: int) -> None:
        """A sidecar has said everything."""
        self.members[rank].has_said_goodbye = True

    def beat(self, rank: int, heartbeat: Heartbeat, now_ns: int) -> None:
        """Progress is a change of place, by the coordinator's clock: hosts' clocks may differ."""
        member = self.members[rank]
        known = member.heartbeat
        place = (heartbeat.step, heartbeat.phase, heartbeat.micro_step)
        if known is None or place != (known.step, known.phase, known.micro_step):
            member.last_progress_ns = now_ns
        member.heartbeat = heartbeat
        member.step, member.phase = heartbeat.step, heartbeat.phase

    def observe(self, observation: Observation, now_ns: int) -> None:
        """Keep what status and metrics show of one observation."""
        member = self.members[observation.rank]
        match observation.body:
            case StepDone() as done:
                member.step = observation.step + 1
                member.last_progress_ns = now_ns
                member.loss = member.loss if done.loss is None else done.loss
                member.gradient_norm = member.gradient_norm if done.gradient_norm is None else done.gradient_norm
                member.overhead_ratio = done.overhead_ratio
                member.step_times = member.step_times.add(done.seconds)
                member.nonfinite = add_nonfinite(member.nonfinite, done)
            case Exited() as exited:
                member.exited = exited
            case SightLost() as lost:
                member.sight_lost[lost.what] = lost.dropped

    @property
    def num_connected(self) -> int:
        """Sidecars on the line, those that said Goodbye and are being heard out too."""
        return sum(member.is_connected for member in self.members.values())

    @property
    def has_everyone_ended(self) -> bool:
        """Every rank that came has ended; some sidecars may still be on the line to hear what is made of it."""
        return bool(self.members) and all(member.state == "ended" for member in self.members.values())

    @property
    def has_anyone_ended(self) -> bool:
        """Some rank has ended: the job is on its way out."""
        return any(member.state == "ended" for member in self.members.values())

    @property
    def is_complete(self) -> bool:
        """Every rank of the job has come."""
        return len(self.members) >= self.world_size

    def blind(self) -> list[str]:
        """What cannot be seen, a sentence each: never to be taken for health."""
        found = []
        for rank, member in sorted(self.members.items()):
            if member.state == "gone":
                found.append(f"rank {rank} on {member.hello.host}: its sidecar is gone")
            found += [f"rank {rank}: {what} ({lost} lost)" for what, lost in sorted(member.sight_lost.items())]
        return found

    def snapshots(self) -> list[RankSnapshot]:
        """For the exporter; a rank that ended has no series any more."""
        return [_snapshot(member) for _, member in sorted(self.members.items()) if member.state != "ended"]


def _snapshot(member: Member) -> RankSnapshot:
    return RankSnapshot(
        rank=member.hello.rank,
        hostname=member.hello.host,
        step=member.step,
        last_progress_s=None if member.last_progress_ns is None else member.last_progress_ns / 1e9,
        phase=member.phase,
        loss=member.loss,
        gradient_norm=member.gradient_norm,
        overhead_ratio=member.overhead_ratio,
        nonfinite=member.nonfinite,
        dropped=member.dropped,
        is_sidecar_up=member.is_connected,
        steps=member.step_times,
    )
