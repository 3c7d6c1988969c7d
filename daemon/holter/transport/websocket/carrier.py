"""The sidecar's or agent's end: a WebSocket to the coordinator, or to the host's agent, that reconnects by itself.

    connect -> Hello -> Welcome -> Report, Report, ... -> Goodbye -> the coordinator closes
       ^__________ backoff __________|  at any failure: refused, garbage, too large a frame, silence

Every wait has a deadline. Records wait in the speech meanwhile, which is bounded.
"""

import asyncio
import contextlib

import aiohttp

from holter import clock
from holter.files import UNREADABLE
from holter.transport import wire
from holter.transport.carrier_life import CarrierLife, LineEndedError, ReplacedError
from holter.transport.interface import OnMessage
from holter.transport.limits import Backoff, UplinkSettings
from holter.transport.speech import RECENT_S, Speech
from holter.transport.tls import SCHEME

UNIX = "unix:"
"""Beginning of the address of an agent on this host."""
_ORDERLY = (aiohttp.WSCloseCode.OK, aiohttp.WSCloseCode.GOING_AWAY)


class WebSocketCarrier(CarrierLife):
    """Carries a speech; `start` it in a running event loop, `close` it at the end.

    `address` is `host:port`, `https://host:port`, or `unix:` and a path.
    """

    def __init__(
        self, address: str, token: str, speech: Speech, on_message: OnMessage, settings: UplinkSettings | None = None
    ) -> None:
        self._socket_path = address.removeprefix(UNIX) if address.startswith(UNIX) else ""
        self._url = f"{address}/ingest" if address.startswith(SCHEME) else f"http://{address}/ingest"
        where = self._socket_path or self._url
        if self._socket_path:
            self._url = "http://localhost/ingest"
        super().__init__(token, speech, on_message, settings, where, Backoff(), RECENT_S)
        self._since_s = 0.0
        """When this connection began."""

    def _failures(self) -> tuple[type[Exception], ...]:
        return (LineEndedError, aiohttp.ClientError, OSError, TimeoutError, ValueError)

    async def _live(self) -> bool:
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
            raise LineEndedError("no Welcome")
        if not self._socket_path:
            self.refusal = ""
        self._since_s = clock.monotonic_s()
        self._speech.begin()
        self._wake.set()
        self.is_connected = True
        self._learn_clock(message)
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
            if not await self._wait_for_news():
                await self._report(socket)
            while not self._speech.is_empty():
                await self._report(socket)
            if self._closing.is_set():
                await self._send(socket, wire.encode(wire.Goodbye()))
                return
            if self._is_clock_due():
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
                    raise ReplacedError(str(frame.extra))
                return None
            if frame.type is aiohttp.WSMsgType.ERROR:
                raise LineEndedError(str(frame.data))
            try:
                if frame.type is aiohttp.WSMsgType.BINARY:
                    return wire.decode_downward(frame.data)
            except UNREADABLE:
                pass
            self.garbage += 1
            num_garbage += 1
            if num_garbage >= self._settings.garbage_limit:
                raise LineEndedError("the coordinator talks nonsense")

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

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, frame: bytes) -> None:
        async with asyncio.timeout(self._settings.send_timeout_s):
            await socket.send_bytes(frame)


def _is_no_sign(frame: aiohttp.WSMessage) -> bool:
    """Whether a frame is no sign of life: a connection given up for lack of an answer, or a refusal."""
    is_refusal = frame.type is aiohttp.WSMsgType.CLOSE and frame.data >= wire.REFUSED
    return is_refusal or frame.type is aiohttp.WSMsgType.ERROR
