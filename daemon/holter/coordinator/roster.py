"""Who is there: ranks, their processes and sidecars, and where each was last seen. Pure: time is an argument.

hello -> connected --goodbye--> ended
            |  ^  ^_____________________
    closed  v  | hello again            | heard again
           gone                       silent: nothing comes, and nobody closed the line

Silence is measured in the coordinator's attention: time in which it was itself not scheduled is nobody's silence.
"""

import hashlib
import hmac
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from holter.exporters.snapshot import STEP_BUCKETS_S, RankSnapshot, StepHistogram, add_nonfinite
from holter.faults.shared.wording import ranks_text
from holter.faults.window import StepArrivals
from holter.records import Exited, Observation, OnDevice, Phase, SightLost, Snapped, StepDone, StepsDone, Traffic, Where
from holter.records.joined import full
from holter.transport.wire import Heartbeat, Hello

State = Literal["connected", "gone", "silent", "ended"]

SILENT_NS = 5 * 10**9
"""Nanoseconds of silence after which a sidecar, which speaks once a second, or the way to it, is lost."""
ABSENT_NS = 120 * 10**9
"""Nanoseconds after the first sidecar's coming until a rank counts as missing; hosts load libraries and models at their
own pace."""
KEPT_SNAPSHOTS = 2
KEPT_NS = 15 * 10**9
"""Nanoseconds for which a restarted coordinator keeps every rank's place for its former sidecar; they come back within
seconds."""
MAX_SIGHT_LOST = 64
"""Largest number of different things noted that one rank's holter cannot see."""
LOOK_NS = 10**9
"""Longest time that counts between two looks; all ranks are checked at most this often."""


BURST_BYTES = 128 * 2**20
"""Bytes that a rank may send at once: the census of a very large model, and what was kept while the coordinator was
away."""
STEADY_BYTES_PER_S = 2**18
"""Bytes per second that it may send steadily; a talkative one sends a tenth of it."""
SMALL_BYTES = 64 * 2**10
"""Messages up to this size are taken in even when memory is short, because a bounded number of small things is kept."""
MEMORY_BYTES, MEMORY_BYTES_OF_RANK = 4 * 2**30, 2**20
"""Memory in bytes above which a coordinator is being flooded."""


@dataclass
class IntakeAllowance:
    """Limits how much is taken in from ranks, each and in all, so that nobody who can report can fill the memory."""

    used: dict[int, tuple[float, int]] = field(default_factory=dict)
    """For each rank, the bytes of its burst that are used up, and as of when."""
    turned_down: dict[int, int] = field(default_factory=dict)
    """For each rank, the number of messages that were not taken in."""
    is_memory_short: bool = False

    def take(self, rank: int, num_bytes: int, now_ns: int) -> bool:
        """Take a message of this size into account; return whether there is room for it."""
        used, then_ns = self.used.get(rank, (0.0, now_ns))
        used = max(0.0, used - max(0, now_ns - then_ns) / 1e9 * STEADY_BYTES_PER_S)
        has_room = used + num_bytes <= BURST_BYTES and not (self.is_memory_short and num_bytes > SMALL_BYTES)
        self.used[rank] = (used + num_bytes if has_room else used, now_ns)
        if not has_room:
            self.turned_down[rank] = self.turned_down.get(rank, 0) + 1
        return has_room

    def look(self, resident_bytes: int, world_size: int) -> None:
        """Check whether this process has become too large."""
        self.is_memory_short = resident_bytes > max(MEMORY_BYTES, world_size * MEMORY_BYTES_OF_RANK)


@dataclass
class LineState:
    """The connection of a rank's sidecar."""

    connection: int
    """Number of the newest connection; the end of an older one is ignored."""
    is_connected: bool = True
    has_hung_up: bool = False
    """Whether it was closed by the other side."""
    is_silent: bool = False
    has_said_goodbye: bool = False
    heard_at_ns: int = 0
    """When something last came, in the coordinator's attention time."""

    @property
    def is_live(self) -> bool:
        """Whether the sidecar at the other end can be asked."""
        return self.is_connected and not self.is_silent


@dataclass
class RankProgress:
    """Where a rank was last seen."""

    heartbeat: Heartbeat | None = None
    moved_ns: int | None = None
    """When it last moved on, by the coordinator's clock; None: not yet."""
    step: int | None = None
    phase: Phase | None = None


@dataclass
class RankNumbers:
    """What a rank last measured."""

    loss: float | None = None
    """The mean of what its backward passes were called on."""
    num_divided: int = 1
    """By how much the script divided the loss for each backward pass."""
    gradient_norm: float | None = None
    overhead_ratio: float | None = None
    step_s: float | None = None
    """Duration of its last step in seconds."""
    lag_s: float | None = None
    """How late it entered collectives, in seconds; None until it reported when it entered one."""
    nonfinite: Mapping[Where, int] = field(default_factory=dict)
    _counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))
    """Number of steps by duration."""
    _total_s: float = 0.0

    def observe(self, done: StepDone) -> None:
        """Take in a completed step."""
        self.loss = self.loss if done.loss is None else done.loss
        self.num_divided = done.num_divided
        self.gradient_norm = self.gradient_norm if done.gradient_norm is None else done.gradient_norm
        self.overhead_ratio = done.overhead_ratio
        self.note_time(done.seconds)
        self.nonfinite = add_nonfinite(self.nonfinite, done)

    def note_time(self, seconds: float) -> None:
        """Take in the duration of the last step."""
        self.step_s = seconds
        self._counts[bisect_left(STEP_BUCKETS_S, seconds)] += 1
        self._total_s += seconds

    @property
    def step_times(self) -> StepHistogram:
        """Histogram of the durations of all steps so far."""
        return StepHistogram(tuple(self._counts), self._total_s)


@dataclass
class Member:
    """One rank, as last heard of."""

    hello: Hello
    line: LineState
    progress: RankProgress = field(default_factory=RankProgress)
    numbers: RankNumbers = field(default_factory=RankNumbers)
    exited: Exited | None = None
    dropped: int = 0
    """Number of observations that it lost before they could be sent."""
    sight_lost: dict[str, int] = field(default_factory=dict)
    """What this rank's holter cannot see, and how much was lost of each."""
    gpu_uuid: str = ""
    is_sharded: bool = False
    """Whether its optimizer applies a part of the model that no other rank has."""
    snapshots: tuple[int, ...] = ()
    """Completed steps of the copies that it has in memory, oldest first."""

    @property
    def state(self) -> State:
        """State of the sidecar; that of an exited rank is not lost, because it has nothing more to do."""
        if self.line.has_said_goodbye or (self.exited is not None and not self.line.is_connected):
            return "ended"
        if self.line.is_silent:
            return "silent"
        return "connected" if self.line.is_connected else "gone"

    @property
    def link(self) -> Literal["connected", "closed", "silent"]:
        """State of the connection.

        One that this side gave up is not closed: the sidecar may come back, or fall silent.
        """
        if self.line.is_silent:
            return "silent"
        return "closed" if not self.line.is_connected and self.line.has_hung_up else "connected"


class Roster:
    """All ranks that ever said Hello."""

    def __init__(self, world_size: int = 0) -> None:
        self.world_size = world_size
        self.members: dict[int, Member] = {}
        self.allowance = IntakeAllowance()
        self.sidecars_lost = 0
        """Number of connections that ended without Goodbye."""
        self.serial = 0
        """Number that changes when anybody comes or goes."""
        self.duplicates = 0
        """Number of times that a rank connected from a second process while the first was still alive."""
        self._dropped_before = 0
        """Number of observations lost by processes whose place another one has taken."""
        self._kept: dict[int, bytes] = {}
        """For each rank, the digest of the key of the sidecar that a former coordinator heard."""
        self._first_at_ns: int | None = None
        """When the first sidecar came, in the coordinator's attention time; None: not yet."""
        self._connections = 0
        self._attention_ns = 0
        """Attention time: nanoseconds in which the coordinator looked and would have heard."""
        self._looked_ns: int | None = None
        self._passed_ns = 0

    def refusal(self, hello: Hello) -> str | None:
        """Return why this sidecar is refused; None if it is not."""
        if self.world_size and hello.world_size != self.world_size:
            return f"world size is {self.world_size} here, {hello.world_size} there"
        if not 0 <= hello.rank < hello.world_size:
            return f"rank {hello.rank} is outside 0..{hello.world_size - 1}"
        known, place = self.members.get(hello.rank), self._kept.get(hello.rank)
        is_kept = place is not None and self._attention_ns < KEPT_NS
        if is_kept and not hmac.compare_digest(place or b"", digest_of(hello.key)):
            return f"the place of rank {hello.rank} is kept for the sidecar that had it before this coordinator was started again"
        if known is not None and known.state == "connected" and not hmac.compare_digest(known.hello.key, hello.key):
            return f"another process speaks for rank {hello.rank}, and is on the line"
        return None

    def keep_places(self, digests: Mapping[int, bytes]) -> None:
        """Keep the places of sidecars that spoke to a former coordinator: for a while nobody else may take them."""
        self._kept = dict(digests)

    def is_new_key(self, hello: Hello) -> bool:
        """Whether this sidecar is not yet known to speak for its rank."""
        known = self.members.get(hello.rank)
        before = self._kept.get(hello.rank) if known is None else digest_of(known.hello.key)
        return bool(hello.key) and before != digest_of(hello.key)

    def connect(self, hello: Hello) -> int:
        """Take in a sidecar, which may have been here before; return the number of its connection."""
        self.world_size = hello.world_size
        self._connections += 1
        self.serial += 1
        if self._first_at_ns is None:
            self._first_at_ns = self._attention_ns
        known = self.members.get(hello.rank)
        if known is None or known.hello.rank_pid != hello.rank_pid or known.hello.host != hello.host:
            if known is not None and known.state == "connected":
                self.duplicates += 1
            self._dropped_before += known.dropped if known is not None else 0
            self.members[hello.rank] = Member(hello, LineState(self._connections))
        else:
            known.hello, known.line = hello, LineState(self._connections)
        self.hear(hello.rank)
        return self._connections

    def hear(self, rank: int) -> None:
        """Note that something came from a rank's sidecar."""
        line = self.members[rank].line
        line.heard_at_ns, line.is_silent = self._attention_ns, False

    def look(self, now_ns: int) -> list[int]:
        """Return the ranks that have fallen silent; may be called often, but checks all ranks only once a second."""
        if self._looked_ns is not None:
            self._attention_ns += min(max(0, now_ns - self._looked_ns), LOOK_NS)
        self._looked_ns = now_ns
        if self._attention_ns - self._passed_ns < LOOK_NS:
            return []
        self._passed_ns = self._attention_ns
        oldest_ns = self._attention_ns - SILENT_NS
        fallen = []
        for rank, member in self.members.items():
            line = member.line
            if line.heard_at_ns < oldest_ns and not line.is_silent and not line.has_hung_up and member.state != "ended":
                line.is_silent = True
                fallen.append(rank)
        return fallen

    def disconnect(self, rank: int, connection: int, *, is_closed: bool = True) -> None:
        """Note that a connection ended, closed by the other side or given up; without Goodbye its sidecar is lost."""
        line = self.members[rank].line
        if line.connection != connection:
            return
        self.serial += 1
        line.is_connected, line.has_hung_up = False, is_closed and not line.is_silent
        if not line.has_said_goodbye:
            self.sidecars_lost += 1

    def goodbye(self, rank: int) -> None:
        """Note that a sidecar has sent everything."""
        self.serial += 1
        self.members[rank].line.has_said_goodbye = True

    def beat(self, rank: int, heartbeat: Heartbeat, now_ns: int) -> None:
        """Take in a heartbeat.

        Progress is a change of place, timed by the coordinator's clock, because hosts' clocks may differ.
        """
        progress = self.members[rank].progress
        known = progress.heartbeat
        place = (heartbeat.step, heartbeat.phase, heartbeat.micro_step)
        if known is None or place != (known.step, known.phase, known.micro_step):
            progress.moved_ns = now_ns
        progress.heartbeat = heartbeat
        progress.step, progress.phase = heartbeat.step, heartbeat.phase

    def observe(self, observation: Observation, now_ns: int) -> None:
        """Keep what status and metrics show of an observation."""
        member = self.members[observation.rank]
        match observation.body:
            case StepDone() as done:
                member.progress.step, member.progress.moved_ns = observation.step + 1, now_ns
                member.is_sharded = member.is_sharded or done.view == "sharded"
                member.numbers.observe(done)
            case Exited() as exited:
                member.exited = exited
            case Snapped():
                member.snapshots = (*member.snapshots, observation.step)[-KEPT_SNAPSHOTS:]
            case OnDevice() as found:
                member.gpu_uuid = found.uuid
            case Traffic(steps=[_, *_]) if member.numbers.lag_s is None:
                member.numbers.lag_s = 0.0
            case SightLost() as lost if lost.what in member.sight_lost or len(member.sight_lost) < MAX_SIGHT_LOST:
                member.sight_lost[lost.what] = lost.dropped

    def observe_joined(self, step: int, joined: StepsDone, now_ns: int) -> None:
        """Keep what status and metrics show of one step of several ranks."""
        num, is_sharded = len(joined.ranks), joined.view == "sharded"
        divided = full(joined.numbers.get("loss.is_divided", [0.0]), num)
        losses: list[float | None] = [*full(joined.loss, num)] if joined.loss is not None else [None] * num
        norms: list[float | None] = [*full(joined.gradient_norm, num)] if joined.gradient_norm else [None] * num
        times = zip(full(joined.seconds, num), full(joined.overhead_ratio, num), strict=True)
        for rank, is_divided, loss, norm, (seconds, overhead) in zip(
            joined.ranks, divided, losses, norms, times, strict=True
        ):
            member = self.members[rank]
            progress, numbers = member.progress, member.numbers
            progress.step, progress.moved_ns = step + 1, now_ns
            member.is_sharded = member.is_sharded or is_sharded
            numbers.loss = numbers.loss if loss is None else loss
            numbers.num_divided = joined.micro_steps if joined.micro_steps > 1 and is_divided == 1.0 else 1
            numbers.gradient_norm = numbers.gradient_norm if norm is None else norm
            numbers.overhead_ratio = overhead
            numbers.note_time(seconds)

    def compare(self, arrivals: Sequence[StepArrivals]) -> None:
        """Keep how late each rank was in the newest step that was compared."""
        late = {arrival.rank: arrival.lag_s for one in arrivals[-1:] for arrival in one.latest}
        for rank, member in self.members.items():
            if member.numbers.lag_s is not None:
                member.numbers.lag_s = max(0.0, late.get(rank, 0.0))

    @property
    def num_connected(self) -> int:
        """Number of connected sidecars, including those that said Goodbye and still have something to send."""
        return sum(member.line.is_connected for member in self.members.values())

    @property
    def has_everyone_ended(self) -> bool:
        """Whether every rank that came has ended; some sidecars may still be connected to hear the verdict."""
        return bool(self.members) and all(member.state == "ended" for member in self.members.values())

    @property
    def is_complete(self) -> bool:
        """Whether every rank of the job has come."""
        return len(self.members) >= self.world_size

    @property
    def dropped(self) -> int:
        """Number of observations lost on the way, including those of ranks that started again."""
        return self._dropped_before + sum(member.dropped for member in self.members.values())

    def absent(self) -> list[int]:
        """Return ranks that have not come although others did long ago, some of which still train."""
        is_early = self._first_at_ns is None or self._attention_ns - self._first_at_ns < ABSENT_NS
        if is_early or self.is_complete or self.has_everyone_ended:
            return []
        return [rank for rank in range(self.world_size) if rank not in self.members]

    def blind(self) -> list[str]:
        """Return what cannot be seen, a sentence each; it must never be taken for health."""
        absent = self.absent()
        verb = "has" if len(absent) == 1 else "have"
        found = [f"{ranks_text(absent)} {verb} not come: no sidecar was ever heard"] if absent else []
        # This is called often, and of thousands of ranks nearly all are well.
        ill = [(rank, member) for rank, member in self.members.items() if member.sight_lost or not member.line.is_live]
        for rank, member in sorted(ill, key=lambda one: one[0]):
            if member.state == "gone":
                found.append(f"rank {rank} on {member.hello.host}: its sidecar is gone")
            elif member.state == "silent":
                found.append(f"rank {rank} on {member.hello.host}: its sidecar is silent, and nobody closed its line")
            found += [f"rank {rank}: {what} ({lost} lost)" for what, lost in sorted(member.sight_lost.items())]
        refused = sorted(self.allowance.turned_down.items())
        return found + [f"rank {rank} says more than is taken in: {num} messages were not" for rank, num in refused]

    def snapshots(self) -> list[RankSnapshot]:
        """Return the state for the exporter: ranks that ended have no series any more, ranks that never came are not up."""
        known = {rank: _snapshot(member) for rank, member in self.members.items() if member.state != "ended"}
        known |= {rank: RankSnapshot(rank, hostname="", is_sidecar_up=False) for rank in self.absent()}
        return [snapshot for _, snapshot in sorted(known.items())]


def digest_of(key: str) -> bytes:
    """Return what is recorded of a sidecar's key."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _snapshot(member: Member) -> RankSnapshot:
    progress, numbers = member.progress, member.numbers
    return RankSnapshot(
        rank=member.hello.rank,
        hostname=member.hello.host,
        gpu_uuid=member.gpu_uuid,
        step=progress.step,
        last_progress_s=None if progress.moved_ns is None else progress.moved_ns / 1e9,
        phase=progress.phase,
        loss=numbers.loss,
        gradient_norm=numbers.gradient_norm,
        lag_s=numbers.lag_s,
        overhead_ratio=numbers.overhead_ratio,
        nonfinite=numbers.nonfinite,
        dropped=member.dropped,
        is_sidecar_up=member.line.is_live,
        steps=numbers.step_times,
    )
