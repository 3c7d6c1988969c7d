"""A coordinator that gives orders only while it holds the run's lease, and stands by until then.

    stands by ──lease──▶ Coordinator: reads the journal, then what the network kept since ──lease lost──▶ stands by
                                    └──the run has ended──▶ ends, and so do those that stand by

While it stands by it serves /healthz, and answers everything else with where the coordinator is.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from dataclasses import replace
from functools import partial

from aiohttp import web

from holter import clock
from holter.coordinator.http.doors import Doors, DoorSettings, runner_of
from holter.coordinator.identity import RunSettings
from holter.coordinator.recovery.rebuilt_run import is_interrupted, is_stale
from holter.coordinator.run_card import card_of
from holter.coordinator.service import Coordinator, ServiceSettings
from holter.files import as_json
from holter.transport.choice import transport_of
from holter.transport.nats.keeper import LeaseKeeper
from holter.transport.nats.line import NatsPlace
from holter.transport.nats.tail import speaks

logger = logging.getLogger(__name__)

LOOK_S = 0.5


class Standby:
    """A process that may become the coordinator, several times."""

    def __init__(self, about: RunSettings, settings: ServiceSettings, place: NatsPlace) -> None:
        self._about, self._settings, self._place = about, settings, place
        self._changed = asyncio.Event()
        self._stop = False
        self._coordinator: Coordinator | None = None

    def stop(self) -> None:
        """Give the lease up, if it is held, and end."""
        self._stop = True
        self._changed.set()
        if self._coordinator is not None:
            self._coordinator.stop()

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake `run`; called by the lease's thread."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._changed.set)

    async def run(self, listener: socket.socket) -> str:
        """Stand by and lead until the run has ended or somebody stops it; return why."""
        loop = asyncio.get_running_loop()
        while True:
            keeper = LeaseKeeper(self._place, self._about.run_id, partial(self._wake, loop))
            keeper.start()
            try:
                if (reason := await self._wait(keeper, listener)) is not None:
                    return reason
                reason = await self._lead(keeper, listener)
            finally:
                self._coordinator = None
            if keeper.standing() != "lost":
                is_over = not self._stop
                await asyncio.to_thread(keeper.close, "ended" if is_over else "released")
                return reason
            logger.warning("this coordinator stands by again")

    async def _wait(self, keeper: LeaseKeeper, listener: socket.socket) -> str | None:
        """Wait until the lease is held, and return None then; otherwise return why to end."""
        door = _WaitingRoom(self._settings.doors, keeper)
        await door.open(listener.dup())
        try:
            while not keeper.is_held:
                self._changed.clear()
                if self._stop:
                    await asyncio.to_thread(keeper.close)
                    return "asked to stop"
                if keeper.is_over:
                    return "the run has ended"
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            await door.close()
        return None

    async def _lead(self, keeper: LeaseKeeper, listener: socket.socket) -> str:
        began_s, about = clock.monotonic_s(), self._about
        if is_interrupted(about, now_ns := clock.wall_ns()) and is_stale(about, now_ns):
            about = replace(about, goes_on=about.goes_on or await speaks(self._place, about.run_id))
        listen = partial(transport_of(self._place.address).listener, place=self._place, right=keeper)
        coordinator = Coordinator(about, self._settings, listen=listen, right=keeper)
        self._coordinator = coordinator
        await coordinator.start(listener.dup())
        logger.info("took over within %.2f s of the lease", clock.monotonic_s() - began_s)
        if self._stop:
            coordinator.stop()
        reason = await coordinator.run()
        keeper.sign(as_json(card_of(coordinator.watched, is_over=not self._stop)))
        return reason


class _WaitingRoom:
    """What is served while standing by."""

    def __init__(self, settings: DoorSettings, keeper: LeaseKeeper) -> None:
        self._doors, self._keeper = Doors(settings), keeper
        self._runner: web.AppRunner | None = None

    async def open(self, listener: socket.socket) -> None:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_route("*", "/{rest:.*}", self._elsewhere)
        self._runner = runner_of(app, shutdown_timeout=0.1)
        await self._runner.setup()
        assert self._runner.server is not None
        await self._doors.open(listener, self._runner.server)

    async def close(self) -> None:
        await self._doors.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"ok": True, "stands_by": True, "waits_for": self._keeper.holder})

    async def _elsewhere(self, _: web.Request) -> web.Response:
        who = self._keeper.holder or "nobody yet"
        text = f"this coordinator stands by; {who} gives the orders, and its address is in coordinator.json\n"
        return web.Response(status=503, text=text, headers={"Retry-After": "1"})


async def serve_with_lease(
    about: RunSettings, settings: ServiceSettings, listener: socket.socket, place: NatsPlace
) -> str:
    """Stand by and lead until the run has ended or SIGTERM or SIGINT comes; return why it ended."""
    standby = Standby(about, settings, place)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, standby.stop)
    return await standby.run(listener)
