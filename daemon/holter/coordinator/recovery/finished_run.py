"""A run that is over, for the page: its journal heard again by a ward that nobody speaks to and that writes nothing.

Incidents are those that were written down; findings are judged again at the moments at which the coordinator learned something, as
`holter replay` does, for the timeline alone.
"""

import asyncio
import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from holter import clock
from holter.coordinator.http.page_state import PageState
from holter.coordinator.http.pages import Pages
from holter.coordinator.identity import Introductions
from holter.coordinator.recovery.journal import Entry
from holter.coordinator.run import Run, RunSettings
from holter.halting import tombstone
from holter.records import Attached, Diagnosis, Exited, Judged, Observation
from holter.transport.wire import Hello


@dataclass
class FinishedRun:
    """Feed it with a journal's entries, in order, then `finish`."""

    settings: RunSettings
    identity: Mapping[str, Any]
    """run.json."""
    ward: Run = field(init=False)
    easel: PageState = field(init=False)
    num_entries: int = 0
    _last_ns: int = field(default_factory=clock.wall_ns)

    def __post_init__(self) -> None:
        self.ward = Run(self.settings)
        self.easel = PageState(self.ward, lambda: self._last_ns, record=self._record())

    def feed(self, entry: Entry) -> None:
        """One entry."""
        if not self.num_entries:
            about, self._last_ns = self.settings, entry.received_ns
            self.ward.introductions = Introductions(about.run_id, about.world_size, entry.received_ns, about.address)
        self.num_entries += 1
        self._last_ns = max(self._last_ns, entry.received_ns)
        body = entry.observation.body
        if isinstance(body, Judged):
            if body.is_news or body.is_final:
                self._judge(entry.received_ns, is_final=body.is_final)
            return
        self.ward.assembly.add(entry.observation, entry.received_ns)
        if entry.observation.rank >= 0:
            self._enter(entry.observation, entry.received_ns)

    def finish(self, diagnoses: Iterable[Diagnosis]) -> None:
        """Everything was heard; these are the incidents."""
        self.ward.incidents.recall(diagnoses)
        self.ward.roster.compare(self.ward.assembly.arrivals())
        for member in self.ward.roster.members.values():
            member.is_connected, member.has_hung_up = False, True
        self.easel.read_vault()
        self.easel.look()

    def _judge(self, now_ns: int, *, is_final: bool) -> None:
        self.ward.findings = self.ward.rounds.make(now_ns, is_final=is_final).findings
        self.easel.timeline.look_at_findings(self.ward.findings, now_ns)

    def _enter(self, observation: Observation, received_ns: int) -> None:
        rank, body, members = observation.rank, observation.body, self.ward.roster.members
        if isinstance(body, Attached):
            if rank in members:
                # Of a former life; its place is taken, and nobody came twice.
                members[rank].is_connected = False
            self.ward.introductions.add(rank, body)
            self.ward.roster.connect(_hello(rank, body.world_size, body.host, body.pid), received_ns)
        elif rank not in members:
            # The journal's oldest part is gone, and how it introduced itself with it.
            self.ward.roster.connect(_hello(rank, max(self.settings.world_size, rank + 1), "", 0), received_ns)
        self.ward.roster.observe(observation, received_ns)
        if isinstance(body, Exited):
            members[rank].phase = body.last_phase

    def _record(self) -> dict[str, Any]:
        """What the page is told of a run that is over."""
        found = {"ended_at": self.identity.get("ended_at")}
        halt = tombstone.read(self.settings.run_dir)
        if halt is not None:
            kept = {"checkpoint": halt.checkpoint, "verdict": halt.verdict}
            found["halt"] = {"course": "done", "step": halt.step, "cause": halt.cause, "reason": halt.why, **kept}
        return found


def _hello(rank: int, world_size: int, host: str, pid: int) -> Hello:
    return Hello(
        run_id="", rank=rank, world_size=world_size, host=host, rank_pid=pid, sidecar_pid=0, metrics_address=""
    )


async def serve(past: FinishedRun, version: str, listener: socket.socket) -> None:
    """Until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pages = Pages(past.ward, version, easel=past.easel)
    app = web.Application()
    app.add_routes(pages.routes())
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await stop.wait()
    await pages.feed.close("the page was closed")
    await runner.cleanup()
    await asyncio.to_thread(past.ward.disk.close, 1.0)
