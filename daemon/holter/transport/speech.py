"""What an uplink has to send, independent of the transport: a rank's records here, a host's in `agent`.

    RankUplink --send, beat--> RankSpeech --next_frame--> Carrier ~~ network ~~
    HostAgent  --------------> HostSpeech --next_frame--> Carrier ~~ network ~~

A carrier that loses its connection puts back what was not sent, and calls `begin` on the next one. Two carriers may
take turns with one speech: nothing is lost when a sidecar changes from its agent to the coordinator.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from holter import clock
from holter.records import Observation
from holter.transport import wire
from holter.transport.outbox import Outbox

RECENT_S = 3.0
"""Records sent this shortly before a connection was lost may not have been written down, because a coordinator writes
once a second."""


class Speech(Protocol):
    """What is still to be sent."""

    on_news: Callable[[bool], None]
    """Called when there is something new to send, with whether it is urgent; set by the current carrier."""

    max_bytes: int
    """Largest frame in bytes that the transport takes; set by the current carrier."""

    keep_s: float
    """Records sent within these last seconds are sent again on the next connection, whose receiver accepts that; set by
    the current carrier."""

    @property
    def hello(self) -> wire.Opening:
        """The first message of a connection."""

    def begin(self) -> None:
        """Prepare for a new connection, which was welcomed: identity is sent again, first."""

    def is_empty(self) -> bool:
        """Whether there is nothing to send; an empty report may be sent all the same, as a sign of life."""

    def next_frame(self, limit: int) -> tuple[object, bytes]:
        """Return the next report with at most `limit` records, as (what to put back if it is not sent, frame)."""

    def put_back(self, said: object) -> None:
        """Put back a report that could not be sent; it comes first again."""

    def note_passed(self, number: int) -> None:
        """Note that the agent has passed on so many of this connection's records."""


def nobody_listens(_: bool, /) -> None:  # noqa: FBT001 - fits `on_news`
    """Do nothing: the listener for news before a carrier has begun."""


class RankSpeech:
    """One rank's records and heartbeat."""

    def __init__(self, hello: wire.Hello, limit: int) -> None:
        self.hello: wire.Opening = hello if hello.boot_id else msgspec.structs.replace(hello, boot_id=clock.clock_id())
        self.outbox = Outbox(limit)
        self.on_news: Callable[[bool], None] = nobody_listens
        self.max_bytes = wire.MAX_FRAME_BYTES
        self.keep_s = 0.0
        self.dropped_before = 0
        """Number of records lost between rank and sidecar."""
        self.is_kept = False
        """Whether an agent is told: what it has not passed on may be lost with it and is then sent again."""
        self._kept: deque[tuple[float, Observation]] = deque(maxlen=limit)
        """Records that were sent, with the time, and are not yet known to be safe."""
        self._passed: deque[tuple[float, Observation]] = deque(maxlen=limit)
        """Records that the agent passed on, with the time: a coordinator that dies together with it may not have written the
        last of them."""
        self._num_passed = 0
        self._heartbeat: wire.Heartbeat | None = None
        self._last_heartbeat: wire.Heartbeat | None = None

    def send(self, observation: Observation, *, urgent: bool = False) -> None:
        """Queue one record."""
        self.outbox.put(observation)
        self.on_news(urgent)

    def beat(self, heartbeat: wire.Heartbeat) -> None:
        """Set where the rank is now; only the newest is sent, and only if it differs from the last one."""
        if heartbeat != self._last_heartbeat:
            self._heartbeat = self._last_heartbeat = heartbeat
            self.on_news(False)

    def begin(self) -> None:
        """Prepare for a new connection: identity and heartbeat first, then what an agent may have lost, then the rest."""
        self.outbox.put_back([observation for _, observation in (*self._passed, *self._kept)])
        self._passed.clear()
        self._kept.clear()
        self._num_passed = 0
        self.outbox.begin()
        self._heartbeat = self._last_heartbeat

    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self.outbox and self._heartbeat is None

    def next_frame(self, limit: int) -> tuple[object, bytes]:
        """Return as many records as fit into a frame; a single record that is too large is dropped and counted."""
        heartbeat, self._heartbeat = self._heartbeat, None
        while True:
            batch = self.outbox.take(limit)
            dropped = self.outbox.dropped + self.dropped_before
            frame = wire.encode(wire.Report(heartbeat=heartbeat, observations=batch, dropped=dropped))
            if len(frame) <= self.max_bytes or not batch:
                self._keep(batch)
                return batch, frame
            if len(batch) == 1:
                self.outbox.dropped += 1
                continue
            self.outbox.put_back(batch)
            limit = len(batch) // 2

    def _keep(self, batch: list[Observation]) -> None:
        now_s = clock.monotonic_s()
        if self.is_kept or self.keep_s:
            self._kept.extend((now_s, observation) for observation in batch)
        while self._kept and not self.is_kept and self._kept[0][0] < now_s - self.keep_s:
            self._kept.popleft()

    def put_back(self, said: object) -> None:
        """Put records back to be sent first; a heartbeat is sent anew with the next connection."""
        assert isinstance(said, list)
        for _ in range(min(len(said), len(self._kept))):
            self._kept.pop()
        self.outbox.put_back(said)

    def note_passed(self, number: int) -> None:
        """Note that so many records of this connection have left the host."""
        now_s = clock.monotonic_s()
        while self._passed and self._passed[0][0] < now_s - RECENT_S:
            self._passed.popleft()
        for _ in range(min(number - self._num_passed, len(self._kept))):
            self._passed.append((now_s, self._kept.popleft()[1]))
        self._num_passed = max(self._num_passed, number)
