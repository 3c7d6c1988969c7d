"""The coordinator's end, or an agent's towards its sidecars: one WebSocket per rank or agent, at /ingest, with the token.

The newest connection of a rank wins.

401                       wrong token
close 4000 with a reason  wrong run, protocol, rank, world size; garbage
close 4001                the rank has opened a newer connection
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from holter import clock
from holter.files import UNREADABLE
from holter.records import Observation, Order
from holter.transport import wire
from holter.transport.access import bearer, is_same, oldest_of_busiest
from holter.transport.host_line import HostLine
from holter.transport.interface import Receiver, refusal
from holter.transport.questions import Questions
from holter.transport.tls import SCHEME

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler

    # A sidecar starts without the detectors.
    from holter.faults import ExamKey, TableKey

HELLO_DEADLINE_S = 5.0
MAX_NAMELESS = 64
"""Largest number of connections that have not yet said whose they are; each may hold an almost complete frame."""
SEND_DEADLINE_S = 5.0
PING_INTERVAL_S = 10.0
LOCAL = "unix"
"""Origin of messages that came through a unix socket."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListenerClock:
    """The clock that this side tells as the coordinator's."""

    now_ns: Callable[[], int] = clock.wall_ns
    clock_id: Callable[[], str] = clock.clock_id
    error_ns: Callable[[], int | None] = lambda: 0
    """How far off it may be, in nanoseconds; None: not known, and the question is not answered."""


OWN_CLOCK = ListenerClock()


@dataclass(frozen=True)
class RankRoute:
    """The connection by which a rank's sidecar is reached."""

    socket: web.WebSocketResponse
    host: HostLine | None = None
    """The agent that the rank speaks through; None if it is connected itself."""


class WebSocketListener:
    """Keeps track of who is connected, and of what was asked of whom."""

    def __init__(
        self, receiver: Receiver, token: str, on_urgent: Callable[[], None], hold: Callable[[int], Awaitable[None]]
    ) -> None:
        self.refused = 0
        """Number of connections that were refused."""
        self._receiver = receiver
        self._token = token
        self._on_urgent = on_urgent
        self._hold = hold
        """Returns when a sidecar that said Goodbye may hang up."""
        self._routes: dict[int, RankRoute] = {}
        self._nameless: dict[RequestHandler, str] = {}
        """Connections that have shown the token but not yet said whose they are, with their address, oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions = Questions()
        self._is_over = False
        """Whether this side hangs up itself."""
        self.clock = OWN_CLOCK
        """The clock to tell; an agent tells the coordinator's."""
        self.on_fetched: Callable[[wire.Fetched], None] = _asked_ourselves
        """Called with answers to requests for tables; an agent passes them on."""

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
            hello = await self._first_word(request, socket)
            reason = await self._serve(socket, hello, request.remote or LOCAL)
        except TimeoutError:
            reason = "no Hello in time"
        except _GarbageError:
            reason = "not a message of this protocol"
        if reason:
            self.refused += 1
            logger.warning("turned a sidecar at %s away: %s", request.remote, reason)
        await _close(socket, wire.REFUSED if reason else WSCloseCode.OK, reason)
        return socket

    async def _first_word(self, request: web.Request, socket: web.WebSocketResponse) -> wire.Upward | None:
        if len(self._nameless) >= MAX_NAMELESS:
            oldest = oldest_of_busiest(self._nameless)
            del self._nameless[oldest]
            if oldest.transport is not None:
                oldest.transport.abort()
        self._nameless[request.protocol] = request.remote or LOCAL
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                hello, _ = await _receive(socket)
        finally:
            self._nameless.pop(request.protocol, None)
        return hello

    async def fetch(self, keys: Sequence["TableKey"], deadline_s: float) -> None:
        """Ask for tables and pass the answers to the receiver; no answer in time counts as not available."""
        answers = await asyncio.gather(*(self._ask(key, deadline_s) for key in keys))
        for key, answer in zip(keys, answers, strict=True):
            self._receiver.hear_table(key, answer, clock.wall_ns())

    async def examine(self, keys: Sequence["ExamKey"]) -> None:
        """Ask for examinations; the answers come later, as observations."""
        asked: dict[wire.Examine, list[int]] = {}
        for key in keys:
            asked.setdefault(wire.Examine(asked_ns=key.asked_ns, depth=key.depth), []).append(key.rank)
        await asyncio.gather(*(self._tell(message, ranks) for message, ranks in asked.items()))

    async def order(self, order: Order, ranks: Sequence[int]) -> None:
        """Give an order to these ranks' sidecars; whoever repeats it tells those that could not be reached."""
        await self._tell(wire.Halt(order=order), ranks)

    async def notify(self, rank: int, notice: wire.Notice) -> bool:
        """Send a notice to one rank's sidecar; False if that was not possible."""
        return await self._tell(notice, [rank])

    async def pass_on(self, message: wire.Downward, ranks: Sequence[int]) -> bool:
        """Send a message to the sidecars of these ranks, which are connected here; False if one could not be told."""
        sockets = [route.socket for rank in ranks if (route := self._routes.get(rank)) is not None]
        sent = await asyncio.gather(*(_send(socket, message) for socket in sockets))
        return len(sent) == len(ranks) and all(sent)

    async def tell_all(self, message: wire.Downward) -> None:
        """Send a message to everybody who is connected here."""
        await self.pass_on(message, list(self._routes))

    async def release(self, rank: int, code: int, reason: str) -> None:
        """End this rank's connection."""
        route = self._routes.get(rank)
        if route is None:
            return
        if route.host is None:
            await _close(route.socket, code, reason)
        else:
            await _send(route.socket, wire.Released(rank=rank, code=code, reason=reason))

    async def hang_up(self) -> None:
        """Close every connection, because the coordinator ends."""
        self._is_over = True
        sockets = {id(route.socket): route.socket for route in self._routes.values()}.values()
        await asyncio.gather(*(_close(socket, WSCloseCode.GOING_AWAY, "the coordinator ends") for socket in sockets))

    async def _tell(self, message: wire.Passed, ranks: Sequence[int]) -> bool:
        """Send to these ranks' sidecars, with one message for all ranks of an agent; False if nobody could be told."""
        straight, by_agent = [], dict[int, tuple[web.WebSocketResponse, list[int]]]()
        for rank in ranks:
            route = self._routes.get(rank)
            if route is not None and route.host is None:
                straight.append(_send(route.socket, message))
            elif route is not None:
                by_agent.setdefault(id(route.socket), (route.socket, []))[1].append(rank)
        passed = (_send(socket, wire.ToRanks(ranks=told, message=message)) for socket, told in by_agent.values())
        return any(await asyncio.gather(*straight, *passed))

    async def _serve(self, socket: web.WebSocketResponse, hello: wire.Upward | None, remote: str) -> str:
        """Serve one sidecar or agent from its Hello to its end; return why it was refused, empty if it was not."""
        if not isinstance(hello, wire.Opening):
            return "the first message must be Hello"
        reason = refusal(hello, self._receiver)
        if reason is not None:
            return reason
        try:
            if isinstance(hello, wire.AgentHello):
                await self._serve_host(socket, HostLine(self._receiver, partial(reachable, remote=remote)))
            else:
                hello = msgspec.structs.replace(hello, metrics_address=reachable(hello.metrics_address, remote))
                await self._serve_rank(socket, hello)
        finally:
            self._on_urgent()
        return ""

    async def _serve_rank(self, socket: web.WebSocketResponse, hello: wire.Hello) -> None:
        rank = hello.rank
        self._replace(self._routes.pop(rank, None), rank)
        connection = self._receiver.connect(hello, clock.wall_ns())
        self._routes[rank] = route = RankRoute(socket)
        try:
            await self._welcome(socket)
            await self._listen(socket, rank)
        finally:
            if self._routes.get(rank) is route:
                del self._routes[rank]
            self._receiver.disconnect(rank, connection, clock.wall_ns(), is_closed=self._is_closed(socket))

    async def _serve_host(self, socket: web.WebSocketResponse, line: HostLine) -> None:
        route = RankRoute(socket, line)
        try:
            await self._welcome(socket)
            while (received := await _receive(socket))[0] is not None:
                message, num_bytes = received
                match message:
                    case wire.HostReport():
                        await self._hear_host(route, message, num_bytes)
                    case wire.ClockAsked(sent_ns=sent_ns):
                        await self._tell_clock(socket, sent_ns)
                    case wire.Goodbye():
                        await _close(socket, WSCloseCode.OK, "")
        finally:
            for rank in line.ranks:
                if self._routes.get(rank) is route:
                    del self._routes[rank]
            line.end(clock.wall_ns(), is_closed=self._is_closed(socket))

    async def _hear_host(self, route: RankRoute, report: wire.HostReport, num_bytes: int) -> None:
        line = route.host
        assert line is not None
        heard = line.take(report, num_bytes, self._questions, clock.wall_ns())
        # The newest connection of a rank wins.
        for rank in heard.came:
            former = self._routes.get(rank)
            if former is not route:
                self._replace(former, rank)
                self._routes[rank] = route
        for rank in heard.goodbyes:
            if self._routes.get(rank) is route:
                self._in_background(self._release_at_host(rank, route))
        for rank in heard.left:
            if self._routes.get(rank) is route:
                del self._routes[rank]
        if heard.is_urgent:
            self._on_urgent()
        self.refused += len(heard.refused)
        for word in heard.refused:
            await _send(route.socket, word)

    async def _release_at_host(self, rank: int, route: RankRoute) -> None:
        await self._hold(rank)
        await _send(route.socket, wire.Released(rank=rank, code=WSCloseCode.OK, reason=""))

    async def _welcome(self, socket: web.WebSocketResponse) -> None:
        run_dir = str(self._receiver.run_dir)
        await _send(socket, wire.Welcome(run_id=self._receiver.run_id, run_dir=run_dir, boot_id=self.clock.clock_id()))

    def _is_closed(self, socket: web.WebSocketResponse) -> bool:
        """Whether the other side closed the connection, as opposed to this side giving it up."""
        return not self._is_over and not isinstance(socket.exception(), TimeoutError)

    def _replace(self, former: RankRoute | None, rank: int) -> None:
        """Close a rank's former connection in the background: it may be dead, and the new one must not wait for it."""
        if former is None:
            return
        if former.host is not None:
            former.host.forget(rank)
            return
        self._in_background(_close(former.socket, wire.REPLACED, "a newer connection of this rank took over"))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_clock(self, socket: web.WebSocketResponse, sent_ns: int) -> None:
        now_ns, error_ns = self.clock.now_ns(), self.clock.error_ns()
        if error_ns is not None:
            told = wire.ClockTold(
                sent_ns=sent_ns, received_ns=now_ns, replied_ns=self.clock.now_ns(), error_ns=error_ns
            )
            await _send(socket, told)

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
                        self.on_fetched(message)
                        self._questions.answer((rank,), message)
                    case wire.ClockAsked(sent_ns=sent_ns):
                        self._receiver.hear_sign(rank, clock.wall_ns())
                        await self._tell_clock(socket, sent_ns)
                    case wire.Goodbye():
                        self._receiver.goodbye(rank)
                        self._on_urgent()
                        held = held or asyncio.create_task(self._release(socket, rank))
        finally:
            if held is not None:
                if not socket.closed:
                    held.cancel()
                await asyncio.gather(held, return_exceptions=True)

    async def _release(self, socket: web.WebSocketResponse, rank: int) -> None:
        await self._hold(rank)
        await _close(socket, WSCloseCode.OK, "")

    async def _ask(self, key: "TableKey", deadline_s: float) -> Observation | None:
        rank = key[2]
        if rank not in self._routes:
            return None
        return await self._questions.ask(key, deadline_s, lambda fetch: self._tell(fetch, [rank]))


def reachable(address: str, remote: str) -> str:
    """Return the address at which a sidecar that speaks from `remote` serves its metrics.

    It is the port that it names on its own host, because Prometheus will be sent there. Through an agent, the
    coordinator judges that by the agent's own address.
    """
    if remote == LOCAL:
        return address
    scheme = SCHEME if address.startswith(SCHEME) else ""
    port = address.rpartition(":")[2]
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16 and remote):
        return ""
    return f"{scheme}[{remote}]:{int(port)}" if ":" in remote else f"{scheme}{remote}:{int(port)}"


def _asked_ourselves(_: wire.Fetched, /) -> None:
    """Do nothing, because the answer is for the coordinator itself."""


class _GarbageError(Exception):
    """A frame that is no message of this protocol."""


async def _receive(socket: web.WebSocketResponse) -> tuple[wire.Upward | None, int]:
    """Return the next message and its size; None at the end of the connection."""
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
    """Send a message; False if the connection is dead or does not take it in time."""
    try:
        async with asyncio.timeout(SEND_DEADLINE_S):
            await socket.send_bytes(wire.encode(message))
    except (ConnectionError, RuntimeError, TimeoutError):
        return False
    return True


async def _close(socket: web.WebSocketResponse, code: int, reason: str) -> None:
    # A close frame holds at most 123 bytes of reason.
    with contextlib.suppress(ConnectionError, RuntimeError, TimeoutError):
        async with asyncio.timeout(SEND_DEADLINE_S):
            await socket.close(code=code, message=reason.encode()[:120])
