"""The coordinator's end: one WebSocket a rank on its own port, at /ingest, with the token; the newest wins.

401                       wrong token
close 4000 with a reason  wrong run, protocol, rank, world size; garbage
close 4001                the rank has opened a newer connection
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from holter import clock
from holter.files import UNREADABLE
from holter.records import Observation, Order
from holter.transport import wire
from holter.transport.access import bearer, is_same
from holter.transport.interface import Receiver, refusal
from holter.transport.tls import SCHEME

if TYPE_CHECKING:
    # A sidecar starts without the detectors.
    from holter.faults import ExamKey, TableKey

HELLO_DEADLINE_S = 5.0
SEND_DEADLINE_S = 5.0
PING_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


class WebSocketListener:
    """Who is connected, and what was asked of whom."""

    def __init__(
        self, receiver: Receiver, token: str, on_urgent: Callable[[], None], hold: Callable[[], Awaitable[None]]
    ) -> None:
        self.refused = 0
        """Connections that were turned away."""
        self._receiver = receiver
        self._token = token
        self._on_urgent = on_urgent
        self._hold = hold
        """Ends when a sidecar that said Goodbye may hang up."""
        self._sockets: dict[int, web.WebSocketResponse] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._questions: dict[int, tuple[int, asyncio.Future[Observation | None]]] = {}
        """Number -> (rank that was asked, its answer)"""
        self._num_questions = 0
        self._is_over = False
        """We hang up ourselves."""

    def mount(self, app: web.Application) -> None:
        """Listen at /ingest."""
        app.router.add_get("/ingest", self._handle)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if not is_same(bearer(request.headers.get("Authorization", "")), self._token):
            self.refused += 1
            return web.Response(status=401, text="wrong token\n", headers={"WWW-Authenticate": "Bearer"})
        socket = web.WebSocketResponse(max_msg_size=wire.MAX_FRAME_BYTES, heartbeat=PING_INTERVAL_S, timeout=2.0)
        await socket.prepare(request)
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                hello, _ = await _receive(socket)
            reason = await self._serve(socket, hello, request.remote or "")
        except TimeoutError:
            reason = "no Hello in time"
        except _GarbageError:
            reason = "not a message of this protocol"
        if reason:
            self.refused += 1
            logger.warning("turned a sidecar at %s away: %s", request.remote, reason)
        await _close(socket, wire.REFUSED if reason else WSCloseCode.OK, reason)
        return socket

    async def fetch(self, keys: Sequence["TableKey"], deadline_s: float) -> None:
        """Ask for tables and hand the answers to the receiver; whoever does not answer in time does not have it."""
        answers = await asyncio.gather(*(self._ask(key, deadline_s) for key in keys))
        for key, answer in zip(keys, answers, strict=True):
            self._receiver.hear_table(key, answer, clock.wall_ns())

    async def examine(self, keys: Sequence["ExamKey"]) -> None:
        """Ask for examinations; the answers come as observations, whenever they come."""
        asked = (wire.Examine(asked_ns=key.asked_ns, depth=key.depth) for key in keys)
        sockets = (self._sockets.get(key.rank) for key in keys)
        sent = [_send(socket, message) for socket, message in zip(sockets, asked, strict=True) if socket is not None]
        await asyncio.gather(*sent)

    async def order(self, order: Order, ranks: Sequence[int]) -> None:
        """Tell these ranks' sidecars; whoever cannot be told is told again by who repeats it."""
        sockets = [socket for rank in ranks if (socket := self._sockets.get(rank)) is not None]
        await asyncio.gather(*(_send(socket, wire.Halt(order=order)) for socket in sockets))

    async def notify(self, rank: int, notice: wire.Notice) -> bool:
        """Tell one rank's sidecar; False when it could not be told."""
        socket = self._sockets.get(rank)
        return socket is not None and await _send(socket, notice)

    async def hang_up(self) -> None:
        """Close every connection: the coordinator ends."""
        self._is_over = True
        sockets = list(self._sockets.values())
        await asyncio.gather(*(_close(socket, WSCloseCode.GOING_AWAY, "the coordinator ends") for socket in sockets))

    async def _serve(self, socket: web.WebSocketResponse, hello: wire.Upward | None, remote: str) -> str:
        """One sidecar from Hello to its end; returns why it was turned away, empty if it was not."""
        if not isinstance(hello, wire.Hello):
            return "the first message must be Hello"
        reason = refusal(hello, self._receiver)
        if reason is not None:
            return reason
        hello = msgspec.structs.replace(hello, metrics_address=reachable(hello.metrics_address, remote))
        self._replace(self._sockets.pop(hello.rank, None))
        connection = self._receiver.connect(hello, clock.wall_ns())
        self._sockets[hello.rank] = socket
        try:
            about = wire.Welcome(
                run_id=self._receiver.run_id, run_dir=str(self._receiver.run_dir), boot_id=clock.clock_id()
            )
            await _send(socket, about)
            await self._listen(socket, hello.rank)
        finally:
            if self._sockets.get(hello.rank) is socket:
                del self._sockets[hello.rank]
            is_closed = not self._is_over and not isinstance(socket.exception(), TimeoutError)
            self._receiver.disconnect(hello.rank, connection, clock.wall_ns(), is_closed=is_closed)
            self._on_urgent()
        return ""

    def _replace(self, former: web.WebSocketResponse | None) -> None:
        """Close a rank's former connection in the background: it may be dead, and the new one must not wait for it."""
        if former is not None:
            task = asyncio.create_task(_close(former, wire.REPLACED, "a newer connection of this rank took over"))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _listen(self, socket: web.WebSocketResponse, rank: int) -> None:
        held: asyncio.Task[None] | None = None
        try:
            while (received := await _receive(socket))[0] is not None:
                message, num_bytes = received
                is_kept = isinstance(message, wire.Report | wire.Fetched)
                if is_kept and not self._receiver.has_room(rank, num_bytes, clock.wall_ns()):
                    continue
                match message:
                    case wire.Report():
                        if self._receiver.hear(rank, message, clock.wall_ns()):
                            self._on_urgent()
                    case wire.Fetched():
                        self._receiver.hear_sign(rank, clock.wall_ns())
                        self._answer(rank, message)
                    case wire.ClockAsked(sent_ns=sent_ns):
                        now_ns = clock.wall_ns()
                        self._receiver.hear_sign(rank, now_ns)
                        told = wire.ClockTold(sent_ns=sent_ns, received_ns=now_ns, replied_ns=clock.wall_ns())
                        await _send(socket, told)
                    case wire.Goodbye():
                        self._receiver.goodbye(rank)
                        self._on_urgent()
                        held = held or asyncio.create_task(self._release(socket))
        finally:
            if held is not None:
                if not socket.closed:
                    held.cancel()
                await asyncio.gather(held, return_exceptions=True)

    async def _release(self, socket: web.WebSocketResponse) -> None:
        await self._hold()
        await _close(socket, WSCloseCode.OK, "")

    async def _ask(self, key: "TableKey", deadline_s: float) -> Observation | None:
        tensor_class, step, rank = key
        socket = self._sockets.get(rank)
        if socket is None:
            return None
        self._num_questions += 1
        number = self._num_questions
        answer: asyncio.Future[Observation | None] = asyncio.get_running_loop().create_future()
        self._questions[number] = (rank, answer)
        try:
            async with asyncio.timeout(deadline_s):
                if await _send(socket, wire.Fetch(request=number, tensor_class=tensor_class, step=step)):
                    return await answer
        except TimeoutError:
            logger.info("rank %d did not send its %s of step %d within %.0f s", rank, tensor_class, step, deadline_s)
        finally:
            del self._questions[number]
        return None

    def _answer(self, rank: int, fetched: wire.Fetched) -> None:
        asked, answer = self._questions.get(fetched.request, (None, None))
        if asked == rank and answer is not None and not answer.done():
            answer.set_result(fetched.observation)


def reachable(address: str, remote: str) -> str:
    """Where a sidecar that speaks from `remote` serves its metrics: at the port it names, on its own host and no other, which Prometheus would be sent to."""
    scheme = SCHEME if address.startswith(SCHEME) else ""
    port = address.rpartition(":")[2]
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16 and remote):
        return ""
    return f"{scheme}[{remote}]:{int(port)}" if ":" in remote else f"{scheme}{remote}:{int(port)}"


class _GarbageError(Exception):
    """A frame that is no message of ours."""


async def _receive(socket: web.WebSocketResponse) -> tuple[wire.Upward | None, int]:
    """The next message and its size; None at the end of the connection."""
    frame = await socket.receive()
    if frame.type is WSMsgType.TEXT:
        raise _GarbageError
    if frame.type is not WSMsgType.BINARY:
        return None, 0
    try:
        return wire.decode_upward(frame.data), len(frame.data)
    except UNREADABLE as error:
        raise _GarbageError from error


async def _send(socket: web.WebSocketResponse, message: wire.Downward) -> bool:
    """False when the connection is dead or does not take it in time."""
    try:
        async with asyncio.timeout(SEND_DEADLINE_S):
            await socket.send_bytes(wire.encode(message))
    except (ConnectionError, RuntimeError, TimeoutError):
        return False
    return True


async def _close(socket: web.WebSocketResponse, code: int, reason: str) -> None:
    # 123 bytes is what a close frame holds.
    with contextlib.suppress(ConnectionError, RuntimeError, TimeoutError):
        async with asyncio.timeout(SEND_DEADLINE_S):
            await socket.close(code=code, message=reason.encode()[:120])
