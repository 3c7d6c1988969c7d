"""The run's stream: made with limits, and read from a position on.

    position 41 ──▶ [42][43][44] ... [97] now ──▶ each in order, once;  what the limits removed before it was read is counted

The consumer needs no acknowledgements: the position is ours, in the journal. One that is interrupted (its server died,
a message was lost) is made again at that position.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holter import clock
from holter.files import UNREADABLE
from holter.transport.nats import frames
from holter.transport.nats.frames import Greeting
from holter.transport.nats.line import NatsPlace, OpenLine, failures, line_to
from holter.transport.nats.subjects import Subjects

if TYPE_CHECKING:
    from nats.aio.msg import Msg

STREAM_BYTES = 2**30
STREAM_AGE_S = 24 * 3600.0
DUPLICATES_S = 120.0
"""Seconds for which the server recognises a message that is sent again."""
HEARTBEAT_S = 1.0
SILENT_S = 3.0
"""Seconds without a heartbeat after which a consumer is made again."""
LAST_WORD_S = 1.0
STILL_S = 90.0
"""Seconds since its Greeting for which a sender counts as there: each repeats it once a minute."""
NOT_CLUSTERED = 10074
WRONG_CONFIG = 10058
REPLICAS = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Position of a message, which the server gives in the reply address."""

    sequence: int
    """Number of the message in the stream."""
    delivered: int
    """Number of the message for this consumer, from 1."""
    at_ns: int
    """When the server received it, in nanoseconds by its clock."""
    pending: int
    """Number of messages behind it in the stream."""


def place_of(reply: str) -> Place | None:
    """Parse `$JS.ACK.STREAM.CONSUMER.TIMES.SEQUENCE.DELIVERED.TIME.PENDING`; None for anything else.

    Newer servers put a domain and an account in between.
    """
    words = reply.split(".")
    if words[:2] != ["$JS", "ACK"] or len(words) < 9:  # noqa: PLR2004
        return None
    numbers = words[4:9] if len(words) == 9 else words[6:11]  # noqa: PLR2004
    if not all(word.isdigit() for word in numbers):
        return None
    _, sequence, delivered, at_ns, pending = map(int, numbers)
    return Place(sequence, delivered, at_ns, pending)


async def make_stream(line: OpenLine, subjects: Subjects) -> int:
    """Make the stream unless it exists; return the number of its last message.

    In a cluster three servers keep it. Raises what nats-py does.
    """
    from nats.js import api, errors  # noqa: PLC0415 - an extra

    with contextlib.suppress(errors.NotFoundError):
        return int((await line.js.stream_info(subjects.stream)).state.last_seq)
    about = api.StreamConfig(
        name=subjects.stream,
        subjects=subjects.kept,
        max_bytes=STREAM_BYTES,
        max_age=STREAM_AGE_S,
        discard=api.DiscardPolicy.OLD,
        storage=api.StorageType.FILE,
        duplicate_window=DUPLICATES_S,
        num_replicas=REPLICAS,
    )
    try:
        made = await line.js.add_stream(about)
    except errors.APIError as error:
        if error.err_code == WRONG_CONFIG:  # Somebody else made it a moment ago, with other limits.
            made = await line.js.stream_info(subjects.stream)
        elif error.err_code == NOT_CLUSTERED:
            made = await line.js.add_stream(about.evolve(num_replicas=1))
        else:
            raise
    return int(made.state.last_seq)


async def last_hellos(line: OpenLine, subjects: Subjects) -> "AsyncIterator[Msg]":
    """Yield the last Greeting of each sender, as far as they arrive in time."""
    from nats.js import api  # noqa: PLC0415 - an extra

    sub = await line.client.subscribe(inbox := line.client.new_inbox())
    about = api.ConsumerConfig(
        deliver_subject=inbox,
        deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT,
        filter_subject=subjects.hello("*"),
        ack_policy=api.AckPolicy.NONE,
        mem_storage=True,
        num_replicas=1,
        inactive_threshold=10.0,
    )
    made = await line.js.add_consumer(subjects.stream, about)
    with contextlib.suppress(*failures()):
        for _ in range(made.num_pending or 0):
            yield await sub.next_msg(timeout=LAST_WORD_S)
    await sub.unsubscribe()


async def speaks(place: NatsPlace, run_id: str) -> bool:
    """Whether a sender that a coordinator of this run has welcomed before is still there."""
    with contextlib.suppress(*failures(*UNREADABLE)):
        async with line_to(place, "coordinator") as line:
            async for message in last_hellos(line, Subjects(run_id)):
                found, at = frames.decode_said(message.data).message, place_of(message.reply)
                is_new = at is not None and clock.system_ns() - at.at_ns < STILL_S * 1e9
                if is_new and isinstance(found, Greeting) and found.is_known:
                    return True
    return False


class Tail:
    """Reads one run's stream; `run` it until the connection is lost, then again on the next one."""

    def __init__(self, subjects: Subjects, hear: Callable[["Msg"], Awaitable[None]]) -> None:
        self.position = 0
        """Number of the last message that was read."""
        self.num_lost = 0
        """Number of messages that the stream's limits removed before they were read."""
        self.has_caught_up = False
        self._subjects, self._hear = subjects, hear
        self._delivered = 0
        self._heard_s = 0.0
        self._is_broken = asyncio.Event()
        self._waiting: asyncio.Queue[Msg] = asyncio.Queue()

    async def run(self, line: OpenLine) -> None:
        """Read until the connection is lost. Raises what nats-py does."""
        while not line.is_lost.is_set():
            inbox = line.client.new_inbox()
            self._waiting = asyncio.Queue()
            sub = await line.client.subscribe(inbox, cb=self._on_message)
            name = ""
            try:
                name = await self._make(line, inbox)
                await self._read()
            finally:
                with contextlib.suppress(*failures()):
                    await sub.unsubscribe()
                    if name:
                        await line.js.delete_consumer(self._subjects.stream, name)

    async def _make(self, line: OpenLine, inbox: str) -> str:
        from nats.js import api  # noqa: PLC0415 - an extra

        self._delivered, self._heard_s = 0, clock.monotonic_s()
        self._is_broken.clear()
        about = api.ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.position + 1,
            ack_policy=api.AckPolicy.NONE,
            idle_heartbeat=HEARTBEAT_S,
            flow_control=True,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=30.0,
        )
        made = await line.js.add_consumer(self._subjects.stream, about)
        if not made.num_pending:
            self.has_caught_up = True
        return str(made.name)

    async def _read(self) -> None:
        while not self._is_broken.is_set():
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    message = await self._waiting.get()
            except TimeoutError:
                if clock.monotonic_s() - self._heard_s > SILENT_S:
                    return
                continue
            place = place_of(message.reply)
            if place is None:
                continue
            if place.delivered != self._delivered + 1:
                return
            self._delivered = place.delivered
            self.num_lost += max(0, place.sequence - self.position - 1) if self.position else 0
            await self._hear(message)
            self.position = place.sequence
            self.has_caught_up = self.has_caught_up or not place.pending

    async def _on_message(self, message: "Msg") -> None:
        self._heard_s = clock.monotonic_s()
        headers: Any = message.headers or {}
        if headers.get("Status") == "100":
            if message.reply:
                # Flow control: the server waits for this answer.
                await message.respond(b"")
            elif not self._waiting.qsize() and _number(headers.get("Nats-Last-Consumer")) > self._delivered:
                self._is_broken.set()
            return
        if headers.get("Status"):
            self._is_broken.set()
            return
        self._waiting.put_nowait(message)


def _number(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isdigit() else 0
