"""The sidecar's or agent's end: a WebSocket to the coordinator, or to the host's agent, that reconnects by itself.

    connect -> Hello -> Welcome -> Report, Report, ... -> Goodbye -> the coordinator closes
       ^__________ backoff __________|  at any failure: refused, garbage, too large a frame, silence

Nothing a coordinator does raises out of here, and every wait has a deadline. Records wait in the speech meanwhile, which is bounded.
Deadlines are `asyncio.timeout`: Python 3.11's `wait_for` swallows a cancellation that comes together with the result.
"""

import asyncio
import contextlib
import logging

import aiohttp

from holter import clock
from holter.files import UNREADABLE
from holter.transport import wire
from holter.transport.clock_offset import ClockOffset
from holter.transport.interface import OnMessage
from holter.transport.limits import Backoff, UplinkSettings
from holter.transport.speech import RECENT_S, Speech
from holter.transport.tls import SCHEME

UNIX = "unix:"
"""Beginning of the address of an agent on this host."""
CLOCK_FIRST = 4
"""Number of first questions for the clock that are asked in quick succession."""
_ORDERLY = (aiohttp.WSCloseCode.OK, aiohttp.WSCloseCode.GOING_AWAY)

logger = logging.getLogger(__name__)


class _ConnectionEndedError(Exception):
    """This connection is over, for this reason; the next one may do better."""


class _ReplacedError(_ConnectionEndedError):
    """Another process speaks for this rank now."""


class WebSocketCarrier:
    """Carries a speech; `start` it in a running event loop, `close` it at the end.

    `address` is `host:port`, `https://host:port`, or `unix:` and a path.
    """

    def __init__(
        self, address: str, token: str, speech: Speech, on_message: OnMessage, settings: UplinkSettings | None = None
    ) -> None:
        self.is_connected = False
        self.heard_s = 0.0
        """When the coordinator last sent anything, even the answer to a ping or a close, or when its agent says that it
        did; by the clock for durations."""
        self.reconnects = 0
        self.garbage = 0
        """Number of the coordinator's frames that could not be read."""
        self.refusal = ""
        """Why the coordinator last refused us; empty if it did not."""
        self.clock = ClockOffset()
        """The estimated offset of the coordinator's clock."""
        self._socket_path = address.removeprefix(UNIX) if address.startswith(UNIX) else ""
        self._url = f"{address}/ingest" if address.startswith(SCHEME) else f"http://{address}/ingest"
        if self._socket_path:
            self._url = "http://localhost/ingest"
        self._token = token
        self._speech = speech
        self._asks_clock = False
        self._clock_asked_s = 0.0
        self._on_message = on_message
        self._settings = settings or UplinkSettings()
        self._backoff = Backoff()
        self._since_s = 0.0
        """When this connection began."""
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._closing = asyncio.Event()
        self._has_said_goodbye = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect in the background."""
        self._speech.on_news = self._news
        self._speech.keep_s = RECENT_S
        self._speech.max_bytes = wire.MAX_FRAME_BYTES
        # Records queued earlier need not wait.
        self._urgent.set()
        self._task = asyncio.create_task(self._run(), name="carrier")

    async def stop(self) -> None:
        """Give up at once without a goodbye, because another carrier continues with the speech."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=self._settings.close_timeout_s)
        self.is_connected = False

    def _news(self, is_urgent: bool) -> None:  # noqa: FBT001 - fits `on_news`
        self._wake.set()
        if is_urgent:
            self._urgent.set()

    async def close(self, deadline_s: float) -> bool:
        """Send what is left and a Goodbye, then answer until the coordinator hangs up; False if that was not done in time."""
        self._closing.set()
        self._wake.set()
        self._urgent.set()
        if self._task is None:
            return False
        done, _ = await asyncio.wait({self._task}, timeout=deadline_s)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)
        return self._has_said_goodbye

    async def _run(self) -> None:
        """Connect again and again until everything has been sent."""
        while True:
            began_s = clock.monotonic_s()
            replaced_pause_s = 0.0
            try:
                if await self._converse():
                    self._has_said_goodbye = True
                    return
                reason = "the coordinator closed the connection"
            except _ReplacedError as error:
                reason, replaced_pause_s = str(error), self._settings.replaced_pause_s
            except (_ConnectionEndedError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
            except Exception:
                logger.exception("the line failed in a way nobody thought of")
                reason = "internal error"
            finally:
                self.is_connected = False
            logger.debug("line to %s: %s", self._url, reason)
            if clock.monotonic_s() - began_s >= self._settings.steady_after_s:
                self._backoff.attempts = 0
            await self._pause(replaced_pause_s or self._backoff.next_s())
            if replaced_pause_s and self._closing.is_set():
                return  # The last word is the other process's.
            self.reconnects += 1

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt; closing cuts it short."""
        if self._closing.is_set():
            await asyncio.sleep(min(seconds, self._settings.closing_pause_s))
            return
        await _signalled(self._closing, seconds)

    async def _converse(self) -> bool:
        """Serve one connection from Hello to its end; True once Goodbye was sent on it and the coordinator hung up."""
        wait_s = self._settings.connect_timeout_s
        timeout = aiohttp.ClientTimeout(total=None, connect=wait_s, sock_connect=wait_s)
        # Made anew each time, because a session closes its connector.
        local = aiohttp.UnixConnector(self._socket_path) if self._socket_path else None
        async with aiohttp.ClientSession(timeout=timeout, connector=local) as session:
            async with asyncio.timeout(wait_s):
                socket = await self._open(session)
            try:
                await self._greet(socket)
                return await self._exchange(socket)
            finally:
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(self._settings.close_timeout_s):
                        await socket.close()

    async def _open(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        try:
            return await session.ws_connect(
                self._url,
                headers={"Authorization": f"Bearer {self._token}"},
                max_msg_size=wire.MAX_FRAME_BYTES,
                heartbeat=self._settings.ping_interval_s,
                autoping=False,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                ssl=self._settings.tls.client() if self._url.startswith(SCHEME) else False,
            )
        except aiohttp.WSServerHandshakeError as error:
            self._turned_away(f"HTTP {error.status}")
            raise

    async def _greet(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        await self._send(socket, wire.encode(self._speech.hello))
        async with asyncio.timeout(self._settings.connect_timeout_s):
            message = await self._receive(socket)
        if not isinstance(message, wire.Welcome):
            raise _ConnectionEndedError("no Welcome")
        if not self._socket_path:
            self.refusal = ""
        self._since_s = clock.monotonic_s()
        self._speech.begin()
        self._wake.set()
        self.is_connected = True
        # A coordinator without a boot id does not know the question for the clock.
        self._asks_clock = message.boot_id not in ("", self._speech.hello.boot_id)
        if message.boot_id == self._speech.hello.boot_id:
            self.clock.be_same()
        self._tell(message)

    async def _exchange(self, socket: aiohttp.ClientWebSocketResponse) -> bool:
        """Send and receive until one of the two ends."""
        talk = asyncio.create_task(self._talk(socket))
        listen = asyncio.create_task(self._listen(socket))
        try:
            await asyncio.wait({talk, listen}, return_when=asyncio.FIRST_COMPLETED)
            if talk.done() and talk.exception() is None:
                # Everything is said; the coordinator may still ask, and hangs up when it has judged.
                await asyncio.wait({listen})
                return listen.exception() is None and socket.close_code in _ORDERLY
            for task in (talk, listen):
                if task.done():
                    task.result()
            return False
        finally:
            for task in (talk, listen):
                task.cancel()
            await asyncio.gather(talk, listen, return_exceptions=True)

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Report at most once per interval, at once if urgent, and now and then in any case; return after Goodbye."""
        while True:
            await _signalled(self._wake, self._settings.keepalive_s)
            is_quiet = not self._wake.is_set()
            if not is_quiet and not self._closing.is_set():
                await _signalled(self._urgent, self._settings.report_interval_s)
            self._wake.clear()
            self._urgent.clear()
            if is_quiet:
                await self._report(socket)
            while not self._speech.is_empty():
                await self._report(socket)
            if self._closing.is_set():
                await self._send(socket, wire.encode(wire.Goodbye()))
                return
            await self._ask_clock(socket)

    async def _ask_clock(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        limits, now_s = self._settings, clock.monotonic_s()
        self.clock.settle(self._settings.wall_ns())
        interval_s = limits.clock_first_s if self.clock.num_answers < CLOCK_FIRST else limits.clock_interval_s
        if self._asks_clock and now_s - self._clock_asked_s > interval_s:
            self._clock_asked_s = now_s
            await self._send(socket, wire.encode(wire.ClockAsked(sent_ns=self._settings.wall_ns())))

    async def _report(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        said, frame = self._speech.next_frame(self._settings.batch_limit)
        try:
            await self._send(socket, frame)
        except BaseException:
            self._speech.put_back(said)
            raise

    async def _listen(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Pass every message to the owner; return when the coordinator hangs up."""
        while (message := await self._receive(socket)) is not None:
            if isinstance(message, wire.ClockTold):
                self.clock.learn(
                    message.sent_ns,
                    message.received_ns,
                    message.replied_ns,
                    self._settings.wall_ns(),
                    told_error_ns=message.error_ns,
                )
                continue
            if isinstance(message, wire.Relayed):
                self._hear_of_coordinator(message)
                self._speech.note_passed(message.passed)
                continue
            answer = self._tell(message)
            if answer is not None:
                await self._send(socket, wire.encode(answer))

    def _hear_of_coordinator(self, told: wire.Relayed) -> None:
        self.is_connected = told.is_connected
        now_s = clock.monotonic_s()
        # An agent accepts us before the coordinator has said whether it does.
        if not self.refusal or now_s - self._since_s > self._settings.steady_after_s:
            self.refusal = ""
            self.heard_s = max(self.heard_s, now_s - told.ago_s)

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> wire.Downward | None:
        """Return the next readable message; None at the connection's end."""
        num_garbage = 0
        while True:
            frame = await self._next_frame_of(socket)
            if frame.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
                if frame.type is aiohttp.WSMsgType.CLOSE and frame.data >= wire.REFUSED:
                    self._turned_away(str(frame.extra))
                if frame.type is aiohttp.WSMsgType.CLOSE and frame.data == wire.REPLACED:
                    raise _ReplacedError(str(frame.extra))
                return None
            if frame.type is aiohttp.WSMsgType.ERROR:
                raise _ConnectionEndedError(str(frame.data))
            try:
                if frame.type is aiohttp.WSMsgType.BINARY:
                    return wire.decode_downward(frame.data)
            except UNREADABLE:
                pass
            self.garbage += 1
            num_garbage += 1
            if num_garbage >= self._settings.garbage_limit:
                raise _ConnectionEndedError("the coordinator talks nonsense")

    async def _next_frame_of(self, socket: aiohttp.ClientWebSocketResponse) -> aiohttp.WSMessage:
        """Return the next frame that is no ping or pong."""
        while True:
            frame = await socket.receive()
            # An agent's own signs of life are not the coordinator's, and a coordinator that refuses us does not watch
            # us.
            if not self._socket_path and not _is_no_sign(frame):
                self.heard_s = clock.monotonic_s()
            if frame.type is aiohttp.WSMsgType.PING:
                await socket.pong(frame.data)
            elif frame.type is not aiohttp.WSMsgType.PONG:
                return frame

    def _tell(self, message: wire.Downward) -> wire.Upward | None:
        try:
            return self._on_message(message)
        except Exception:
            logger.exception("a message of the coordinator could not be handled")
            return None

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, frame: bytes) -> None:
        async with asyncio.timeout(self._settings.send_timeout_s):
            await socket.send_bytes(frame)

    def _turned_away(self, reason: str) -> None:
        if reason != self.refusal:
            logger.warning("the coordinator at %s turned us away: %s", self._socket_path or self._url, reason)
        self.refusal = reason


def _is_no_sign(frame: aiohttp.WSMessage) -> bool:
    """Whether a frame is no sign of life: a connection given up for lack of an answer, or a refusal."""
    is_refusal = frame.type is aiohttp.WSMsgType.CLOSE and frame.data >= wire.REFUSED
    return is_refusal or frame.type is aiohttp.WSMsgType.ERROR


async def _signalled(event: asyncio.Event, deadline_s: float) -> None:
    """Wait for the event, for at most so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            await event.wait()
