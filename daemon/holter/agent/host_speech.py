"""The reports of a host's sidecars, waiting for the coordinator; records are joined where nothing is lost by that.

    rank 0  Attached  step 7  Logged  step 8          HostReport: Attached (0), Attached (1), steps 7 of ranks 0 and 1 as one record,
    rank 1  Attached  step 7          step 8    ->                Logged (0), steps 8 of ranks 0 and 1 as one record

Each rank's own order is kept, so that the coordinator's window is the one that the ranks' own lines would have given.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from holter import clock
from holter.records import Observation, StepDone
from holter.records.joined import Told, join, kind
from holter.transport import wire
from holter.transport.outbox import Outbox
from holter.transport.speech import nobody_listens

OUTBOX_LIMIT = 5000
"""Number of records kept for each rank while the coordinator is away."""
QUIET_TICKS = 5
"""A sidecar that has been silent for this many ticks of the agent counts as quiet; normally it reports once a
second."""


@dataclass
class HostMember:
    """One sidecar of the host."""

    hello: wire.Hello
    connection: int
    outbox: Outbox = field(default_factory=lambda: Outbox(OUTBOX_LIMIT))
    is_told: bool = False
    """Whether the coordinator knows that this sidecar is here."""
    heartbeat: wire.Heartbeat | None = None
    is_beat_told: bool = True
    dropped_before: int = 0
    """Number of lost records that the sidecar itself has reported."""
    told_dropped: int = 0
    has_said_goodbye: bool = False
    is_goodbye_told: bool = False
    left: bool | None = None
    """None while its connection stands; else whether the sidecar's side closed it."""
    heard_tick: int = 0
    received: int = 0
    """Number of records that came on this connection of the sidecar."""

    @property
    def dropped(self) -> int:
        """Number of records lost so far on the way to the coordinator."""
        return self.dropped_before + self.outbox.dropped


@dataclass(frozen=True)
class SaidOfHost:
    """Content of one frame, kept so that it can be put back if the frame is not sent."""

    report: wire.HostReport
    batches: dict[int, list[Observation]]
    gone: dict[int, HostMember] = field(default_factory=dict)
    """Sidecars that were removed because the frame held their last records."""

    def __bool__(self) -> bool:
        """Whether it must not be lost. Heartbeats and quiet ranks alone may be, because they are sent again."""
        told = self.report
        return bool(told.joined or told.observations or told.fetched or told.dropped or told.goodbyes or told.left)


class HostSpeech:
    """Everything that the sidecars of a host have told the agent and the coordinator has not received yet."""

    def __init__(self, hello: wire.AgentHello) -> None:
        self._hello = hello
        self.on_news: Callable[[bool], None] = nobody_listens
        self.max_bytes = wire.MAX_FRAME_BYTES
        self.keep_s = 0.0
        self.members: dict[int, HostMember] = {}
        self._fetched: deque[wire.Fetched] = deque()
        self._ticks = 0
        self._turn = 0
        self._recent: deque[tuple[float, SaidOfHost]] = deque()
        """Frames that were sent, with their time, but that the coordinator may not have written down yet."""
        self._connections = 0

    @property
    def hello(self) -> wire.Opening:
        """The opening message: who the agent is, and for which sidecars it speaks."""
        return msgspec.structs.replace(self._hello, members=[member.hello for member in self.members.values()])

    def join(self, hello: wire.Hello) -> int:
        """Add a sidecar, which may have been here before; return the number of its connection."""
        self._connections += 1
        known = self.members.get(hello.rank)
        if known is not None and known.hello.rank_pid == hello.rank_pid:
            known.hello, known.connection, known.left, known.is_told = hello, self._connections, None, False
            known.received = 0
        else:
            self.members[hello.rank] = HostMember(hello, self._connections)
        self.members[hello.rank].heard_tick = self._ticks
        self.on_news(True)
        return self._connections

    def hear(self, rank: int, report: wire.Report, *, urgent: bool) -> None:
        """Take in a report of a sidecar."""
        member = self.members[rank]
        member.heard_tick = self._ticks
        if report.heartbeat is not None:
            member.heartbeat, member.is_beat_told = report.heartbeat, False
        member.dropped_before = max(member.dropped_before, report.dropped)
        member.received += len(report.observations)
        for observation in report.observations:
            member.outbox.put(observation)
        if urgent or report.observations or report.heartbeat is not None:
            self.on_news(urgent)

    def hear_sign(self, rank: int) -> None:
        """Note that a sidecar has said something other than a report."""
        self.members[rank].heard_tick = self._ticks

    def hear_fetched(self, fetched: wire.Fetched) -> None:
        """Take in a table that the coordinator asked for."""
        self._fetched.append(fetched)
        self.on_news(True)

    def goodbye(self, rank: int) -> None:
        """Note that a sidecar has sent its last record."""
        self.members[rank].has_said_goodbye = True
        self.on_news(True)

    def leave(self, rank: int, connection: int, *, is_closed: bool) -> None:
        """Note that a sidecar's connection has ended."""
        member = self.members.get(rank)
        if member is not None and member.connection == connection:
            member.left = is_closed
            self.on_news(True)

    def tick(self) -> None:
        """Count the agent's own time, called at even intervals while it runs; sidecars that are silent meanwhile become quiet."""
        self._ticks += 1

    def num_passed(self, rank: int) -> int:
        """Return how many records of this connection of the sidecar have left this host."""
        member = self.members[rank]
        return max(0, member.received - len(member.outbox))

    def begin(self) -> None:
        """Prepare to tell a coordinator again which sidecars are here, and what a former coordinator may have lost."""
        for _, said in reversed(self._recent):
            self._put_back_records(said)
        self._recent.clear()
        for member in self.members.values():
            member.outbox.begin()
            member.is_told, member.is_beat_told = False, member.heartbeat is None
            member.is_goodbye_told, member.told_dropped = False, 0

    def is_empty(self) -> bool:
        """Whether there is nothing new to send."""
        return not self._fetched and not any(map(_has_news, self.members.values()))

    def next_frame(self, limit: int) -> tuple[object, bytes]:
        """Return as much as fits into a frame; a single record that is too large is dropped and counted."""
        while True:
            said = self._next(limit)
            frame = wire.encode(said.report)
            if len(frame) <= self.max_bytes:
                said.gone.update((rank, self.members.pop(rank)) for rank, _ in said.report.left)
                self._keep(said)
                return said, frame
            taken = sum(map(len, said.batches.values()))
            if taken == 1:
                (rank,) = (rank for rank, batch in said.batches.items() if batch)
                self.members[rank].outbox.dropped += 1
                said.batches.clear()
            self.put_back(said)
            limit = max(1, taken // 2)

    def put_back(self, said: object) -> None:
        """Put back the content of a frame that could not be sent."""
        assert isinstance(said, SaidOfHost)
        if self._recent and self._recent[-1][1] is said:
            self._recent.pop()
        self._fetched.extendleft(reversed(said.report.fetched))
        # A sidecar that has come anew meanwhile replaces the one that left.
        self.members.update((rank, member) for rank, member in said.gone.items() if rank not in self.members)
        self._put_back_records(said)
        for hello in said.report.joined:
            if hello.rank in self.members:
                self.members[hello.rank].is_told = False
        for rank in said.report.goodbyes:
            if rank in self.members:
                self.members[rank].is_goodbye_told = False

    def _put_back_records(self, said: SaidOfHost) -> None:
        for rank, batch in said.batches.items():
            if rank in self.members:
                self.members[rank].outbox.put_back(batch)

    def _keep(self, said: SaidOfHost) -> None:
        now_s = clock.monotonic_s()
        if self.keep_s:
            self._recent.append((now_s, said))
        while self._recent and self._recent[0][0] < now_s - self.keep_s:
            self._recent.popleft()

    def note_passed(self, number: int) -> None:
        """Do nothing: no agent speaks through another agent."""

    def _next(self, limit: int) -> SaidOfHost:
        members = self.members
        joined = [member.hello for member in members.values() if not member.is_told]
        heartbeats = [
            (rank, member.heartbeat)
            for rank, member in members.items()
            if member.heartbeat is not None and not member.is_beat_told
        ]
        batches = self._take(limit)
        dropped = [(rank, member.dropped) for rank, member in members.items() if member.dropped != member.told_dropped]
        over = [rank for rank, member in members.items() if not member.outbox]
        goodbyes = [rank for rank in over if members[rank].has_said_goodbye and not members[rank].is_goodbye_told]
        left = [(rank, is_closed) for rank in over if (is_closed := members[rank].left) is not None]
        for member in members.values():
            member.is_told = member.is_beat_told = True
            member.told_dropped = member.dropped
        for rank in goodbyes:
            members[rank].is_goodbye_told = True
        report = wire.HostReport(
            joined=joined,
            heartbeats=heartbeats,
            observations=list(joined_where_alike(batches.values())),
            fetched=self._take_fetched(),
            dropped=dropped,
            quiet=[rank for rank, member in members.items() if self._ticks - member.heard_tick > QUIET_TICKS],
            goodbyes=goodbyes,
            left=left,
        )
        return SaidOfHost(report, batches)

    def _take(self, limit: int) -> dict[int, list[Observation]]:
        """Take a fair share of records from each rank; the rank that comes first changes each time."""
        self._turn += 1
        ranks = list(self.members)
        first = self._turn % max(1, len(ranks))
        batches = {}
        for place, rank in enumerate(ranks[first:] + ranks[:first]):
            share = -(-limit // (len(ranks) - place))
            batches[rank] = self.members[rank].outbox.take(share)
            limit -= len(batches[rank])
        return batches

    def _take_fetched(self) -> list[wire.Fetched]:
        """Take some tables, because they are large; one that fits into no frame is reported as missing."""
        found: list[wire.Fetched] = []
        left = self.max_bytes // 2
        while self._fetched:
            size = len(wire.encode(self._fetched[0]))
            if size > left and found:
                break
            fetched = self._fetched.popleft()
            fits = size <= self.max_bytes // 2
            found.append(fetched if fits else wire.Fetched(request=fetched.request, observation=None))
            left -= size if fits else 0
        return found


def _has_news(member: HostMember) -> bool:
    is_beaten = member.heartbeat is not None and not member.is_beat_told
    has_ended = member.has_said_goodbye and not member.is_goodbye_told
    return bool(member.outbox) or is_beaten or has_ended or not member.is_told or member.left is not None


def joined_where_alike(batches: Iterable[list[Observation]]) -> Iterator[Observation]:
    """Yield all records, each rank's in its own order; steps of the same kind are joined into one record."""
    queues = [deque(batch) for batch in batches]
    while queues := [queue for queue in queues if queue]:
        for queue in queues:
            while queue and not isinstance(queue[0].body, StepDone):
                yield queue.popleft()
        steps = [queue[0].step for queue in queues if queue]
        if not steps:
            return
        groups: dict[object, list[Told]] = {}
        # The earliest step first, so that ranks that were cut off in the middle of a step can be joined, too.
        for queue in queues:
            if not queue or queue[0].step != min(steps):
                continue
            said = queue.popleft()
            assert isinstance(said.body, StepDone)
            alike = kind(said.body)
            if alike is None:
                yield said
            else:
                groups.setdefault(alike, []).append((said.rank, said.at_ns, said.body))
        for parts in groups.values():
            rank, at_ns, done = parts[0]
            body = join(parts) if len(parts) > 1 else done
            yield Observation(rank=rank, step=min(steps), at_ns=at_ns, body=body)
