"""A run that is over, for the page: its journal read again into a `Run` that nobody is connected to and that writes nothing.

Incidents are those that were written down; findings are judged again at the moments at which the coordinator learned something, for the
timeline alone.
"""

import asyncio
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from holter import clock
from holter.coordinator.http.page_state import PageState
from holter.coordinator.http.pages import Pages
from holter.coordinator.identity import Introductions, RunSettings
from holter.coordinator.recovery.journal import Entry
from holter.coordinator.recovery.replay import Moment, judge_again, with_moments
from holter.coordinator.run import Run
from holter.faults import ALL, Detector
from holter.halting import halt_record
from holter.records import Attached, Diagnosis, Exited, Observation
from holter.transport.wire import Hello


class FinishedRun:
    """`read` a journal's entries, then `finish`."""

    def __init__(self, settings: RunSettings, identity: Mapping[str, Any], detectors: Sequence[Detector] = ALL) -> None:
        """`identity`: run.json."""
        self._settings, self._identity = settings, identity
        self._last_ns = clock.wall_ns()
        self.run = Run(settings, detectors)
        self.page_state = PageState(self.run, lambda: self._last_ns, record=self._record())
        self.diagnoses: dict[str, Diagnosis] = {}
        """As they are judged now."""

    def read(self, entries: Iterable[Entry]) -> None:
        """All of the journal, in order."""
        is_first = True
        for item in with_moments(entries, "news"):
            if isinstance(item, Moment):
                self._last_ns = max(self._last_ns, item.at_ns)
                judge_again(self.run.judging, item, self.diagnoses)
                self.page_state.timeline.look_at_findings(self.run.judging.findings, item.at_ns)
                continue
            if is_first:
                is_first = False
                self._begin(item.received_ns)
            self._last_ns = max(self._last_ns, item.received_ns)
            self.run.assembly.add(item.observation, item.received_ns)
            if item.observation.rank >= 0:
                self._enter(item.observation, item.received_ns)

    def finish(self, diagnoses: Iterable[Diagnosis]) -> None:
        """Everything was heard; these are the incidents."""
        self.run.incidents.recall(diagnoses)
        self.run.roster.compare(self.run.assembly.arrivals())
        for member in self.run.roster.members.values():
            member.line.is_connected, member.line.has_hung_up = False, True
        self.page_state.read_vault()
        self.page_state.look()

    def _begin(self, first_ns: int) -> None:
        about, self._last_ns = self._settings, first_ns
        self.run.intake.introductions = Introductions(about.run_id, about.world_size, first_ns, about.address)

    def _enter(self, observation: Observation, received_ns: int) -> None:
        rank, body, members = observation.rank, observation.body, self.run.roster.members
        if isinstance(body, Attached):
            if rank in members:
                # Of a former life; its place is taken, and nobody came twice.
                members[rank].line.is_connected = False
            self.run.intake.introductions.add(rank, body)
            self.run.roster.connect(_hello(rank, body.world_size, body.host, body.pid))
        elif rank not in members:
            # The journal's oldest part is gone, and how it introduced itself with it.
            self.run.roster.connect(_hello(rank, max(self._settings.world_size, rank + 1), "", 0))
        self.run.roster.observe(observation, received_ns)
        if isinstance(body, Exited):
            members[rank].progress.phase = body.last_phase

    def _record(self) -> dict[str, Any]:
        """What the page is told of a run that is over."""
        found = {"ended_at": self._identity.get("ended_at")}
        halt = halt_record.read(self._settings.run_dir)
        if halt is not None:
            kept = {"checkpoint": halt.checkpoint, "verdict": halt.verdict}
            found["halt"] = {"course": "done", "step": halt.step, "cause": halt.cause, "reason": halt.why, **kept}
        return found


def _hello(rank: int, world_size: int, host: str, pid: int) -> Hello:
    return Hello(
        run_id="", rank=rank, world_size=world_size, host=host, rank_pid=pid, sidecar_pid=0, metrics_address=""
    )


async def serve(finished: FinishedRun, version: str, listener: socket.socket) -> None:
    """Until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pages = Pages(finished.run, version, page_state=finished.page_state)
    app = web.Application()
    app.add_routes(pages.routes())
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await stop.wait()
    await pages.events.close("the page was closed")
    await runner.cleanup()
    await asyncio.to_thread(finished.run.disk.close, 1.0)
