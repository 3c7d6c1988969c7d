"""A sidecar's or agent's end: its records go into the run's stream, whether or not a coordinator is there to read them.

    ┌─▶ connecting ──Greeting──▶ waits for Welcome ──▶ sends, and is acknowledged ──Goodbye, LetGo──▶ closed
    └──────── backoff ◀──────────── at any failure: refused, silence, a server that is gone

After the first Welcome, records go into the stream even while coordinators change; the server's acknowledgement says
that it has them. A coordinator with a higher token than any before is greeted anew; one with a lower token is ignored
from then on.
"""

import asyncio
import contextlib
import logging
import math
import secrets
from typing import TYPE_CHECKING, Any

from holter import clock
from holter.files import UNREADABLE
from holter.transport import wire
from holter.transport.carrier_life import CarrierLife, LineEndedError, ReplacedError, signalled
from holter.transport.interface import OnMessage
from holter.transport.limits import Backoff, UplinkSettings
from holter.transport.nats import frames
from holter.transport.nats.frames import Again, Beacon, Greeting, LetGo, Probe, Said, Told, TurnedAway
from holter.transport.nats.line import INBOX, NatsPlace, OpenLine, failures, line_to
from holter.transport.nats.subjects import ALL, Subjects, credential_of, host_name
from holter.transport.speech import Speech

if TYPE_CHECKING:
    from nats.aio.msg import Msg

HERE_S = 3.5
"""Seconds without a coordinator's beacon after which it counts as absent."""
MOVE_S, MAX_MOVE_S = 4.0, 60.0
"""Seconds that a server is kept although no coordinator is heard through it; at first and at most."""
KEEP_S = 3.0
"""Seconds for the server to acknowledge a message."""
REPEAT_S = 60.0
"""Seconds between two Greetings while nothing else happens."""
SPARE_BYTES = 4096
"""Bytes of a message that are left for its headers."""
SMALL_BYTES = 2**20

logger = logging.getLogger(__name__)


class NatsCarrier(CarrierLife):
    """Carries a speech into the stream; `start` it in a running event loop, `close` it at the end."""

    def __init__(
        self, address: str, token: str, speech: Speech, on_message: OnMessage, settings: UplinkSettings | None = None
    ) -> None:
        # The server keeps what it was told: nothing is said again.
        super().__init__(
            token, speech, on_message, settings, f"{address} of {speech.hello.run_id}", Backoff(cap_s=2.0), 0.0
        )
        self.coordinator_token = 0
        """Highest coordinator's token that was heard."""
        self.num_stale = 0
        """Number of messages from older coordinators, which were ignored."""
        self._place = NatsPlace(address, self._settings.credentials, self._settings.tls)
        self._name = name_of_speaker(speech.hello)
        self._subjects = Subjects(speech.hello.run_id)
        self._who = secrets.token_bytes(8)
        self._num_said = 0
        self._unacknowledged: tuple[int, object, bytes] | None = None
        """A report that may or may not be in the stream: its number, what to put back, and its encoded frame. None if
        there is none."""
        self._is_welcome = asyncio.Event()
        self._is_let_go = asyncio.Event()
        self._told: asyncio.Queue[Msg] = asyncio.Queue()
        self._greeted_s = -math.inf
        self._greeted: wire.Opening | None = None
        """The opening message as it was sent then; an agent's also lists who speaks through it."""
        self._num_moves = 0
        """Number of changes to other servers since a coordinator was last heard."""

    def start(self) -> None:
        """Begin to connect, in the background."""
        if (problem := self._place.problem()) is not None:
            logger.error("%s is not watched: %s", self._name, problem)
            return
        super().start()

    async def stop(self) -> None:
        """Give up at once; what may not be in the stream is the next carrier's to say."""
        await super().stop()
        if self._unacknowledged is not None:
            self._speech.put_back(self._unacknowledged[1])
            self._unacknowledged = None

    def _failures(self) -> tuple[type[Exception], ...]:
        return failures(LineEndedError)

    async def _live(self) -> bool:
        async with line_to(self._place, credential_of(self._name)) as line:
            return await self._converse(line)

    async def _converse(self, line: OpenLine) -> bool:
        """Serve one connection from Greeting to its end; True once Goodbye was sent and the coordinator released us."""
        self._told = asyncio.Queue()
        for who in (self._name, ALL):
            await line.client.subscribe(self._subjects.told(who), cb=self._on_told)
        self._greeted_s = -math.inf
        talk, listen = asyncio.create_task(self._talk(line)), asyncio.create_task(self._listen(line))
        lost = asyncio.create_task(line.lost())
        tasks: set[asyncio.Task[Any]] = {talk, listen, lost}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if talk.done() and talk.exception() is None:
                # Everything is said; the coordinator may still ask, and lets go when it has judged.
                let_go = asyncio.create_task(self._is_let_go.wait())
                tasks.add(let_go)
                await asyncio.wait({listen, lost, let_go}, return_when=asyncio.FIRST_COMPLETED)
                if self._is_let_go.is_set():
                    return True
            for task in (talk, listen):
                if task.done():
                    task.result()
            return False
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _talk(self, line: OpenLine) -> None:
        """Send what there is, at most once per interval, at once if urgent, and a sign of life now and then; return after Goodbye."""
        while True:
            now_s = clock.monotonic_s()
            self.is_connected = self._is_welcome.is_set() and now_s - self.heard_s < HERE_S
            self._look_for_the_coordinator(line, now_s)
            is_due = now_s - self._greeted_s > REPEAT_S or self._speech.hello != self._greeted
            if not self._is_welcome.is_set() or is_due:
                await self._greet(line, is_repeated=self._is_welcome.is_set() and self._greeted_s > 0)
            if not self._is_welcome.is_set():
                await signalled(self._is_welcome, self._settings.keepalive_s)
                continue
            has_news = await self._wait_for_news()
            if self._unacknowledged is not None:
                await self._say_again(line)
            if not has_news:
                await self._report(line)
            while not self._speech.is_empty():
                await self._report(line)
            if self._closing.is_set():
                await self._keep(line, wire.Goodbye())
                return
            await self._ask_clock(line)

    def _look_for_the_coordinator(self, line: OpenLine, now_s: float) -> None:
        """Change to another server if no coordinator is heard through this one, less and less often.

        A server that is cut off from the others looks healthy from here.
        """
        if now_s - self.heard_s < HERE_S:
            self._num_moves = 0
        elif self._place.is_several and now_s - line.opened_s > min(MOVE_S * 2**self._num_moves, MAX_MOVE_S):
            self._num_moves += 1
            raise LineEndedError("no coordinator is heard through this server")

    async def _greet(self, line: OpenLine, *, is_repeated: bool = False) -> None:
        """Introduce ourselves in the stream; the caller tries again until it works.

        The first coordinator makes the stream; until then nobody acknowledges.
        """
        self._greeted_s, self._greeted = clock.monotonic_s(), self._speech.hello
        server = str(line.client._server_info.get("server_id", ""))  # noqa: SLF001 - nothing public tells it
        greeting = Greeting(
            token=self._token,
            hello=self._greeted,
            server=server,
            is_repeated=is_repeated,
            is_known=self._is_welcome.is_set(),
        )
        frame = frames.encode(Said(self._who, greeting))
        await line.js.publish(self._subjects.hello(self._name), frame, timeout=KEEP_S)

    async def _report(self, line: OpenLine) -> None:
        """Send a report. Records go into the stream; a mere sign of life is not kept by anyone, because the next one is newer."""
        self._speech.max_bytes = min(line.max_bytes - SPARE_BYTES, wire.MAX_FRAME_BYTES)
        said, message = self._speech.next_frame(self._settings.batch_limit)
        frame = frames.envelop(self._who, message)
        if not said:
            await line.client.publish(self._subjects.alive(self._name), frame)
            return
        self._num_said += 1
        # The records have left the speech: they are held here until the server has them.
        self._unacknowledged = (self._num_said, said, frame)
        await self._say_again(line)

    async def _say_again(self, line: OpenLine) -> None:
        assert self._unacknowledged is not None
        number, _, frame = self._unacknowledged
        headers = {"Nats-Msg-Id": f"{self._who.hex()}-{number}"}
        await line.js.publish(self._subjects.said(self._name), frame, timeout=KEEP_S, headers=headers)
        self._unacknowledged = None

    async def _keep(self, line: OpenLine, message: wire.Upward) -> None:
        frame = frames.encode(Said(self._who, message))
        await line.js.publish(self._subjects.said(self._name), frame, timeout=KEEP_S)

    async def _ask_clock(self, line: OpenLine) -> None:
        limits = self._settings
        if not self.is_connected or not self._is_clock_due():
            return
        asked = frames.encode(Said(self._who, wire.ClockAsked(sent_ns=limits.wall_ns())))
        with contextlib.suppress(*failures(*UNREADABLE)):
            answer = await line.client.request(self._subjects.clock, asked, timeout=1.0)
            heard_ns, told = limits.wall_ns(), frames.decode_told(answer.data)
            if isinstance(told.message, wire.ClockTold) and told.token >= self.coordinator_token:
                said = told.message
                self.clock.learn(said.sent_ns, said.received_ns, said.replied_ns, heard_ns)

    async def _on_told(self, message: "Msg") -> None:
        self._told.put_nowait(message)

    async def _listen(self, line: OpenLine) -> None:
        """Pass every message to the owner."""
        while True:
            message = await self._told.get()
            try:
                told = frames.decode_told(message.data)
            except UNREADABLE:
                self.garbage += 1
                continue
            if not self._is_current(told):
                continue
            await self._hear(line, told.message, message)

    def _is_current(self, told: Told) -> bool:
        """Whether this is the newest coordinator heard of: an older one that wakes up can order nothing."""
        if told.token < self.coordinator_token:
            self.num_stale += 1
            if self.num_stale == 1 or isinstance(told.message, wire.Halt):
                kind = type(told.message).__name__
                logger.warning(
                    "an older coordinator's %s is not obeyed: token %d, and %d was heard",
                    kind,
                    told.token,
                    self.coordinator_token,
                )
            return False
        # A coordinator that turned us away does not watch us.
        if not self.refusal:
            self.heard_s = clock.monotonic_s()
        if told.token > self.coordinator_token:
            if self.coordinator_token:
                logger.info("another coordinator gives the orders now: token %d", told.token)
            self.coordinator_token = told.token
            # A new coordinator must hear who we are, and our identity again.
            self._greeted_s = -math.inf
            self._speech.begin()
            self._wake.set()
        return True

    async def _hear(self, line: OpenLine, told: Any, message: "Msg") -> None:
        match told:
            case Beacon() | Again():
                if self._greeted_s < 0 or isinstance(told, Again):
                    await self._greet(line)
            case Probe():
                await self._respond(message, frames.encode(Said(self._who, wire.ClockAsked(sent_ns=0))))
            case LetGo() if self._closing.is_set():
                self._is_let_go.set()
            case TurnedAway(reason=reason, is_replaced=is_replaced):
                self._turned_away(reason)
                raise ReplacedError(reason) if is_replaced else LineEndedError(reason)
            case wire.Welcome():
                self._welcome(told)
                self._tell(told)
            case wire.Fetch():
                await self._respond(message, self._fetched(line, told))
            case wire.Examine() | wire.Halt() | wire.Notice() | wire.ToRanks() | wire.Released():
                answer = self._tell(told)
                if answer is not None:
                    await self._keep(line, answer)

    def _fetched(self, line: OpenLine, asked: wire.Fetch) -> bytes:
        answer = self._tell(asked)
        content = frames.encode(Said(self._who, answer)) if isinstance(answer, wire.Fetched) else b""
        if len(content) > line.max_bytes - SPARE_BYTES:
            content = frames.encode(Said(self._who, wire.Fetched(request=asked.request, observation=None)))
        return content

    async def _respond(self, message: "Msg", content: bytes) -> None:
        if message.reply.startswith(INBOX) and content:
            await message.respond(content)

    def _welcome(self, told: wire.Welcome) -> None:
        self.refusal = ""
        if not self._is_welcome.is_set():
            self._speech.begin()
        self._is_welcome.set()
        self.is_connected = True
        self._wake.set()
        self._learn_clock(told)

    def _turned_away(self, reason: str) -> None:
        self._is_welcome.clear()
        super()._turned_away(reason)


def name_of_speaker(hello: wire.Opening) -> str:
    """Return the name of the sender in subjects (WHO)."""
    return str(hello.rank) if isinstance(hello, wire.Hello) else host_name(hello.host)
