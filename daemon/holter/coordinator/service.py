"""The coordinator as a process: one listening socket, one loop that judges, an end that comes by itself.

    sidecars --/ingest--> Lines --> Ward --judge--> tables to fetch, news to tell, incidents to keep
    people   --/, /api, /metrics--> Pages

The decisions are elsewhere and pure (Ward, lifetime); here are only sockets, timers and signals.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from holter import clock
from holter.coordinator import identity
from holter.coordinator.disk import write_atomically
from holter.coordinator.ingest import Lines
from holter.coordinator.lifetime import Limits, end_reason
from holter.coordinator.pages import Pages
from holter.coordinator.ward import Judgement, Ward, WardSettings
from holter.detectors import ALL, Detector
from holter.diagnosis import report
from holter.transport import wire

logger = logging.getLogger(__name__)

MAX_FETCH_ROUNDS = 4
"""A detector may ask for more after it has seen what it asked for; then the next judgement goes on."""


@dataclass(frozen=True)
class ServiceSettings:
    """How the process behaves."""

    token: str
    """What a sidecar must show."""
    version: str = ""
    """Of holter, for the metrics."""
    judge_interval_s: float = 0.25
    """The longest time between two judgements; what is urgent is judged at once."""
    urgent_interval_s: float = 0.05
    """The shortest: ranks that all report NaN at every step must not leave time for nothing else."""
    fetch_deadline_s: float = 2.0
    """How long sidecars may take to send a table."""
    flush_interval_s: float = 1.0
    """How long what is to be written may stay in memory."""
    disk_deadline_s: float = 5.0
    """At the end, for what is still to be written."""
    limits: Limits = field(default_factory=Limits)


class Coordinator:
    """Watches one run: `start`, then `run` until there is nothing left to do."""

    def __init__(self, ward: WardSettings, settings: ServiceSettings, detectors: Sequence[Detector] = ALL) -> None:
        self.ward = Ward(ward, detectors)
        self._settings = settings
        self._lines = Lines(self.ward, settings.token, self._hurry, self._hold)
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._is_over = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._quiet_since_s = clock.monotonic_s()
        self._flushed_s = clock.monotonic_s()

    async def start(self, listener: socket.socket) -> None:
        """Serve on a socket that is bound already; whoever calls meanwhile waits in its queue."""
        self.ward.recall(clock.wall_ns())
        app = web.Application()
        app.add_routes([web.get("/ingest", self._lines.handle), *Pages(self.ward, self._settings.version).routes()])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=1024).start()
        self._write_access()
        self.ward.write_down()

    def stop(self) -> None:
        """End soon, after a last judgement."""
        self._stop.set()
        self._hurry()

    async def run(self) -> str:
        """Judge until the end; returns why it ended."""
        reason = None
        while reason is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.judge_interval_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._judge()
            self._flush()
            reason = self._end_reason()
            await asyncio.sleep(self._settings.urgent_interval_s)
        logger.info("ending: %s", reason)
        await self._judge(is_final=True)
        self._is_over.set()
        await self._close()
        return reason

    async def _judge(self, *, is_final: bool = False) -> None:
        """Judge, fetch what is missing, judge again; tell the news."""
        for _ in range(MAX_FETCH_ROUNDS):
            judgement = self.ward.judge(clock.wall_ns(), is_final=is_final)
            await self._tell(judgement)
            if not judgement.needs:
                return
            await self._lines.fetch(judgement.needs, self._settings.fetch_deadline_s)
        await self._tell(self.ward.judge(clock.wall_ns(), is_final=is_final))

    async def _tell(self, judgement: Judgement) -> None:
        for diagnosis in judgement.fresh:
            text = report.headline(diagnosis)
            logger.warning("incident %s: %s", diagnosis.id, text)
            await self._lines.notify(0, wire.Notice(severity=diagnosis.severity, text=text))

    def _hurry(self) -> None:
        self._wake.set()

    async def _hold(self) -> None:
        """Until the last judgement is made, but no longer than a sidecar should have to wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.limits.hold_s):
                await self._is_over.wait()

    def _end_reason(self) -> str | None:
        if self._stop.is_set():
            return "asked to stop"
        now_s = clock.monotonic_s()
        roster = self.ward.roster
        if roster.members and not roster.has_everyone_ended and roster.num_connected:
            self._quiet_since_s = now_s
        return end_reason(roster, now_s - self._quiet_since_s, self._settings.limits)

    def _flush(self) -> None:
        now_s = clock.monotonic_s()
        if now_s - self._flushed_s >= self._settings.flush_interval_s or self.ward.journal.is_filling:
            self._flushed_s = now_s
            self.ward.write_down()

    async def _close(self) -> None:
        await self._lines.hang_up()
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.to_thread(self.ward.close, clock.wall_ns(), self._settings.disk_deadline_s)

    def _write_access(self) -> None:
        access = identity.Access(address=self.ward.settings.address, token=self._settings.token, pid=os.getpid())
        path = self.ward.settings.run_dir / "coordinator.json"
        self.ward.disk.submit(partial(write_atomically, path, identity.as_json(access), 0o600))


async def serve(ward: WardSettings, settings: ServiceSettings, listener: socket.socket) -> str:
    """Run a coordinator until its work is done or SIGTERM or SIGINT comes; returns why it ended."""
    coordinator = Coordinator(ward, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, coordinator.stop)
    await coordinator.start(listener)
    return await coordinator.run()
