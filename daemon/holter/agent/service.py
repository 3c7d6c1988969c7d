"""The agent's loop: a unix socket for the host's sidecars, one line to the coordinator.

    sidecars --unix socket, 0700, own user only--> WebSocketListener --> HostAgent --> HostSpeech --> carrier --> coordinator
             <--Welcome, orders, questions, Relayed--                      <--ToRanks, Released, Welcome--

The socket is there only once the coordinator has answered: until then sidecars have nobody here to wait for. What the agent holds is the token to
report; orders pass through it, and whoever obeys them judges them, as without an agent.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from holter import clock
from holter.agent.host_speech import HostSpeech
from holter.errors import UsageError
from holter.records import Observation
from holter.records.urgent import is_urgent
from holter.transport import wire
from holter.transport.choice import transport_of
from holter.transport.clock_offset import UNKNOWN_NS
from holter.transport.limits import UplinkSettings
from holter.transport.local_socket import prepare
from holter.transport.websocket.listener import ListenerClock, WebSocketListener

TICK_S = 0.5
RELAY_TICKS = 4
"""Number of ticks after which sidecars are told how the connection to the coordinator is: every two seconds."""
UCRED = struct.Struct("3i")
"""Pid, uid and gid of the process at the other end of a socket."""
CLOSE_S = 3.0
"""Seconds at the end for sending what is left."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostAgentSettings:
    """Where the agent listens, and whom it reports to."""

    socket_path: Path
    coordinator: str
    token: str
    """Token for reporting to the coordinator."""
    run_id: str = ""
    """Id of the run; empty: whatever run the coordinator watches."""
    first_s: float = 120.0
    """Seconds after which the agent ends if the coordinator has not answered or no sidecar has come; 0: never."""
    idle_s: float = 30.0
    """Seconds after the last sidecar's leaving until the agent ends; 0: never."""
    uplink: UplinkSettings = field(default_factory=UplinkSettings)


class HostAgent:
    """Connects one host's sidecars, through their listener, with the coordinator, through a carrier."""

    def __init__(self, settings: HostAgentSettings) -> None:
        self.run_id, self.run_dir = settings.run_id, Path()
        self._settings = settings
        hello = wire.AgentHello(
            run_id=settings.run_id, host=socket.gethostname(), agent_pid=os.getpid(), boot_id=clock.clock_id()
        )
        self.speech = HostSpeech(hello)
        self._welcome: wire.Welcome | None = None
        self._welcomed = asyncio.Event()
        self._carrier = transport_of(settings.coordinator).carrier(
            settings.coordinator, settings.token, self.speech, self._on_message, settings.uplink
        )
        self._listener = WebSocketListener(self, settings.token, lambda: None, self._hold)
        self._listener.clock = ListenerClock(self._coordinator_ns, self._clock_id, self._clock_error)
        self._listener.on_fetched = self.speech.hear_fetched
        self._held: dict[int, asyncio.Event] = {}
        """Ranks that have said goodbye and wait until the coordinator releases them."""
        self._tasks: set[asyncio.Task[object]] = set()
        self._stop = asyncio.Event()
        self._was_connected = False

    async def run(self) -> str:
        """Serve until there is nothing left to do; return why it ended."""
        self._carrier.start()
        runner: web.AppRunner | None = None
        try:
            if not await self._is_set(self._welcomed, self._settings.first_s):
                return (
                    "asked to stop"
                    if self._stop.is_set()
                    else f"no coordinator answered: {self._carrier.refusal or 'no connection'}"
                )
            runner = await self._open()
            return await self._serve()
        finally:
            if runner is not None:
                self._settings.socket_path.unlink(missing_ok=True)
            await self._carrier.close(CLOSE_S)
            if runner is not None:
                await self._listener.hang_up()
                await runner.cleanup()

    def stop(self) -> None:
        """Make `run` end soon."""
        self._stop.set()

    async def _open(self) -> web.AppRunner:
        app = web.Application(middlewares=[own_user_only])
        self._listener.mount(app)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        path = self._settings.socket_path
        if (problem := prepare(path.parent)) is not None:
            raise UsageError(problem)
        # The file may be left from an agent that died; one that is alive would hold the lock.
        path.unlink(missing_ok=True)
        try:
            await web.UnixSite(runner, path).start()
        except OSError as error:
            raise UsageError(f"cannot listen on {path}: {error.strerror or error}") from None
        logger.info("serving at %s", path)
        return runner

    async def _serve(self) -> str:
        limits, ticks = self._settings, 0
        quiet_since_s, has_anyone_come = clock.monotonic_s(), False
        while not await self._is_set(self._stop, TICK_S):
            self.speech.tick()
            ticks += 1
            if ticks % RELAY_TICKS == 0 or self._carrier.is_connected != self._was_connected:
                await self._relay()
            # A sidecar that has left may still have records to be passed on, perhaps to a coordinator that has ended,
            # too.
            if any(member.left is None for member in self.speech.members.values()):
                quiet_since_s, has_anyone_come = clock.monotonic_s(), True
            patience_s = limits.idle_s if has_anyone_come else limits.first_s
            if patience_s and clock.monotonic_s() - quiet_since_s > patience_s:
                return "every sidecar has left" if has_anyone_come else "no sidecar came"
        return "asked to stop"

    async def _relay(self) -> None:
        """Tell the sidecars whether the coordinator is connected, and how many of their records have left this host."""
        self._was_connected = self._carrier.is_connected
        ago_s = max(0.0, clock.monotonic_s() - self._carrier.heard_s)
        for rank, member in list(self.speech.members.items()):
            if member.left is None:
                passed = self.speech.num_passed(rank)
                told = wire.Relayed(is_connected=self._was_connected, ago_s=ago_s, passed=passed)
                await self._listener.pass_on(told, [rank])

    async def _is_set(self, event: asyncio.Event, deadline_s: float) -> bool:
        """Wait until the event is set, for at most `deadline_s` (0: without limit) or until the agent is stopped; return whether it is set."""
        waiting = {asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._stop.wait())}
        await asyncio.wait(waiting, timeout=deadline_s or None, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()
        return event.is_set()

    # What the coordinator says.

    def _on_message(self, message: wire.Downward) -> wire.Upward | None:
        match message:
            case wire.Welcome():
                self.run_id, self.run_dir = message.run_id, Path(message.run_dir)
                is_first, self._welcome = self._welcome is None, message
                self._welcomed.set()
                if not is_first:
                    # The coordinator may have been restarted: ranks that stand still, or in a halt, report so again.
                    self._later(self._listener.tell_all(message))
                self._later(self._relay())
            case wire.ToRanks(ranks=ranks, message=passed):
                self._later(self._pass_on(passed, ranks))
            case wire.Released(rank=rank, code=code, reason=reason):
                held = self._held.get(rank)
                if held is not None:
                    held.set()
                else:
                    self._later(self._listener.release(rank, code, reason))
            case _:
                pass
        return None

    async def _pass_on(self, message: wire.Passed, ranks: list[int]) -> None:
        for rank in ranks:
            is_told = await self._listener.pass_on(message, [rank])
            if isinstance(message, wire.Fetch) and not is_told:
                self.speech.hear_fetched(wire.Fetched(request=message.request, observation=None))

    def _later(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _coordinator_ns(self) -> int:
        return clock.wall_ns() + self._carrier.clock.offset_ns

    def _clock_id(self) -> str:
        """Return the id of the coordinator's clock; a sidecar with the same clock need not ask for the time."""
        return self._welcome.boot_id if self._welcome is not None else ""

    def _clock_error(self) -> int | None:
        error_ns = self._carrier.clock.error_ns
        return error_ns if error_ns < UNKNOWN_NS else None

    # What the sidecars say: we are their listener's Receiver.

    def refusal(self, hello: wire.Hello) -> str | None:
        """Accept every sidecar: the coordinator decides who may take part."""
        del hello
        return None

    def connect(self, hello: wire.Hello, now_ns: int) -> int:
        """Note that a sidecar is connected."""
        del now_ns
        self._later(self._relay())
        return self.speech.join(hello)

    def disconnect(self, rank: int, connection: int, now_ns: int, *, is_closed: bool) -> None:
        """Note that its connection ended."""
        del now_ns
        self.speech.leave(rank, connection, is_closed=is_closed)

    def hear(self, rank: int, report: wire.Report, now_ns: int) -> bool:
        """Take in its report."""
        del now_ns
        self.speech.hear(rank, report, urgent=any(map(is_urgent, report.observations)))
        return False

    def hear_host(self, ranks: object, report: wire.HostReport, now_ns: int) -> bool:
        """Refuse: no agent speaks through another agent."""
        del ranks, report, now_ns
        return False

    def has_room(self, rank: int, num_bytes: int, now_ns: int) -> bool:
        """Return True: the outboxes are bounded by themselves."""
        del rank, num_bytes, now_ns
        return True

    def hear_sign(self, rank: int, now_ns: int) -> None:
        """Note another sign of life of it."""
        del now_ns
        self.speech.hear_sign(rank)

    def hear_table(self, key: object, answer: Observation | None, now_ns: int) -> None:
        """Do nothing: tables are passed on as they come, because the agent asks for none."""

    def goodbye(self, rank: int) -> None:
        """Note that it has sent its last record."""
        self.speech.goodbye(rank)

    @property
    def taken(self) -> int | None:
        """None: a unix socket keeps no position."""
        return None

    def took(self, sequence: int, num_lost: int = 0) -> None:
        """Do nothing, because a unix socket keeps no position."""

    async def begin_at(self, sequence: int) -> None:
        """Do nothing, because a unix socket keeps no position."""

    def caught_up(self) -> None:
        """Do nothing, because a unix socket keeps no position."""

    async def _hold(self, rank: int) -> None:
        """Wait until the coordinator releases the rank."""
        held = self._held.setdefault(rank, asyncio.Event())
        try:
            await held.wait()
        finally:
            self._held.pop(rank, None)


@web.middleware
async def own_user_only(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse other users by the kernel's credentials of the peer, in case the directory's permissions were changed."""
    line = request.transport.get_extra_info("socket") if request.transport is not None else None
    uid = -1
    if line is not None:
        with contextlib.suppress(OSError):
            _, uid, _ = UCRED.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
    if uid != os.getuid():
        return web.Response(status=403, text="another user's\n")
    return await handler(request)
