"""The sidecar's loop: it reads the page, sends what it finds, and watches the process.

page ring --read--> history (tables stay here) --> link (everything else) --> coordinator
heartbeat, /proc -> watcher: does the rank move on; the recorder, and what an examination shows
pidfd ------------> the rank ended: read the rest, report what it left and how it ended, say Goodbye, end
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from holter import clock
from holter.exporters.prometheus import expose, families
from holter.files import UNREADABLE
from holter.page import CONTROL_NOTHING, CONTROL_THIN, PageReader
from holter.records import (
    LEFT,
    Body,
    Census,
    Exited,
    Farewell,
    LastCalls,
    Observation,
    PackedTable,
    Phase,
    StepDone,
    Table,
)
from holter.sidecar.coordinator_link import CoordinatorLink, LinkSettings
from holter.sidecar.devices import Devices
from holter.sidecar.job_log import ErrorFile, LastLine
from holter.sidecar.orders import Orders
from holter.sidecar.process import Process, ProcessEnding
from holter.sidecar.rank_watcher import RankWatcher
from holter.sidecar.state import MetricsServer, MetricsSettings, RankState, StatusLine, say_in_job_log
from holter.transport import wire

POLL_S = 0.05
SHOW_S = 0.5
ENDING_PATIENCE_S = 1.0
"""Seconds for which an exit code is looked for after the process is gone."""
BOOTSTRAP_PATIENCE_S = 0.5
GOODBYE_DEADLINE_S = 10.0
RELAX_S = 60.0
MAX_TABLE_BYTES = 4 << 20

logger = logging.getLogger(__name__)
Names = dict[str, list[str]]
"""Names of parameters and of buffers, in the order of the tables."""
NamedTable = tuple[Observation, Names]


@dataclass(frozen=True)
class SidecarSettings:
    """The settings that the rank passes on the command line."""

    page: int | str
    bootstrap_fd: int = -1
    listen_fd: int = -1
    recorder: str = ""
    """Path of the socket of the rank's Flight Recorder; empty if it has none."""
    crash_fd: int = -1
    """Socket on which a crashing rank reports that."""
    orders_fd: int = -1
    """Socket of the rank's halt agent."""
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    terminal: str = ""
    stderr_fd: int = -1
    """The rank's standard error, for the last line after its end."""
    error_file: str = ""
    """File from which the launcher makes its summary of a failed rank; empty if it makes none."""
    version: str = ""
    credentials: str = ""
    """Path of the credentials for the network by which the coordinator is reached; empty if none are needed."""
    local_rank: int = 0
    visible_devices: str | None = None
    """Visible devices as in the rank's environment; None if it names none."""
    kernel_log: str = ""
    agent: str = ""
    """The host's agent, as in the settings; empty if none is used."""


class Sidecar:
    """Watches one rank until it has ended."""

    def __init__(self, settings: SidecarSettings, log_to: Callable[[Path], None]) -> None:
        self._settings = settings
        self._page = PageReader.open(settings.page)
        identity = self._page.identity
        self.rank = identity.rank
        self._process = Process(identity.pid, identity.started_ticks)
        self._state = RankState(self.rank, socket.gethostname())
        self._history = TableHistory()
        self._decoder = msgspec.msgpack.Decoder(Observation)
        self._num_undecodable = 0
        self._farewell: Farewell | None = None
        self._farewell_step: int | None = None
        """Completed steps when the rank left its process group; None if it has not, or has reported a step since."""
        self._has_ended = False
        self._named_dir = ""
        """The run directory, as the coordinator names it."""
        self._thinning, self._dropped_seen, self._thinned_at = 0, 0, 0.0
        self._status = StatusLine(settings.terminal) if settings.terminal else None
        self._last_line = LastLine(settings.stderr_fd)
        self._error_file = ErrorFile(settings.error_file)
        ways = LinkSettings(settings.metrics.tls, settings.credentials, settings.agent)
        self._link = CoordinatorLink(identity, self._answer, log_to, ways)
        self._orders = Orders(
            self._page, self._process, lambda said: self._link.send(said, urgent=True), lambda: self._link.is_connected
        )
        devices = Devices(settings.local_rank, settings.visible_devices, settings.kernel_log)
        self._watcher = RankWatcher(
            identity, self._process, self._state, self._tell, clock_error=lambda: self._link.clock, devices=devices
        )

    async def run(self) -> None:
        """Watch until the rank has ended and everything was reported."""
        self._page.beat(pid=os.getpid(), at_ns=clock.wall_ns())
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        if self._process.pidfd >= 0:
            loop.add_reader(self._process.pidfd, ended.set)
        else:
            ended.set()
        server = MetricsServer(self._settings.metrics, self._scrape, self._health)
        self._link.metrics_address = await server.start()
        if self._settings.bootstrap_fd >= 0:
            self._link.listen(loop, self._settings.bootstrap_fd, self._settings.listen_fd)
        self._watcher.start(self._settings.recorder, self._settings.crash_fd)
        if self._settings.orders_fd >= 0:
            self._orders.listen(loop, self._settings.orders_fd)
        try:
            await self._watch(ended)
            if self._process.pidfd >= 0:
                loop.remove_reader(self._process.pidfd)
            await self._say_how_it_ended()
            await self._orders.close()
        finally:
            if self._status is not None:
                self._status.close()
            self._last_line.close()
            await server.stop()

    async def _watch(self, ended: asyncio.Event) -> None:
        shown_at = 0.0
        while not ended.is_set():
            self._turn()
            self._watcher.look(self._page.heartbeat(), is_excused=self._orders.is_standing)
            now = clock.monotonic_s()
            if (news := self._link.look(now)) is not None:
                logger.warning("%s", news)
                # Other ranks would write the same into the same log, unless it concerns only them.
                if self.rank == 0 or self._link.refusal:
                    self._give_notice(news)
            if self._status is not None and now - shown_at > SHOW_S and self._state.step:
                self._status.show(self._state.line())
                shown_at = now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), POLL_S)

    def _turn(self) -> int:
        """Read the page once; return how many observations it had."""
        self._page.beat(pid=os.getpid(), at_ns=clock.wall_ns())
        heartbeat = self._page.heartbeat()
        if heartbeat is not None:
            self._state.learn_heartbeat(heartbeat)
            self._link.beat(
                wire.Heartbeat(heartbeat.step, Phase(heartbeat.phase), heartbeat.micro_step, heartbeat.at_ns)
            )
        payloads = self._page.read()
        for payload in payloads:
            self._take(payload)
        self._press_back()
        self._link.note_dropped(self.dropped)
        return len(payloads)

    @property
    def dropped(self) -> int:
        """Number of observations lost between the rank and the uplink."""
        return self._page.dropped + self._page.torn + self._link.num_dropped + self._num_undecodable

    def _take(self, payload: bytes) -> None:
        try:
            observation = self._decoder.decode(payload)
        except UNREADABLE:
            self._num_undecodable += 1
            return
        body = observation.body
        if isinstance(body, PackedTable):
            self._history.keep(observation)
            return
        if isinstance(body, LastCalls):
            self._watcher.hear_last_calls(body, observation.at_ns)
            return
        if isinstance(body, Census):
            self._history.learn_census(body)
        elif isinstance(body, StepDone) and self._farewell_step is not None and observation.step >= self._farewell_step:
            # It had left its process group, and now trains in another one.
            self._farewell = self._farewell_step = None
        elif isinstance(body, Farewell):
            self._farewell, self._farewell_step = body, observation.step if body.text == LEFT else None
            if body.kind == "exception" or body.text.startswith("sys.exit("):
                place = f"at step {observation.step}, {body.own[0] if body.own else body.where}"
                self._error_file.add(f"{body.text}\n{place}")
        self._state.learn(observation)
        self._watcher.learn(observation)
        self._link.send(observation, urgent=isinstance(body, StepDone) and bool(body.nonfinite))

    def _tell(self, body: Body, urgent: bool) -> None:  # noqa: FBT001
        """Send something that the sidecar itself observed."""
        self._link.send(self._observed(body), urgent=urgent)

    def _observed(self, body: Body) -> Observation:
        heartbeat = self._page.heartbeat()
        return Observation(rank=self.rank, step=heartbeat.step if heartbeat else 0, at_ns=clock.wall_ns(), body=body)

    def _press_back(self) -> None:
        """Ask the rank to compare less often while the ring overflows; relax that step by step once it no longer does."""
        now = clock.monotonic_s()
        if self._page.dropped > self._dropped_seen:
            self._dropped_seen, self._thinned_at = self._page.dropped, now
            self._thinning = min(self._thinning + 1, 6)
        elif self._thinning and now - self._thinned_at > RELAX_S:
            self._thinning, self._thinned_at = self._thinning - 1, now
        else:
            return
        self._page.set_control(CONTROL_THIN if self._thinning else CONTROL_NOTHING, self._thinning)

    def _answer(self, message: wire.Downward) -> wire.Upward | None:
        match message:
            case wire.Fetch():
                table = self._history.table(message.tensor_class, message.step)
                return wire.Fetched(request=message.request, observation=table)
            case wire.Examine():
                return self._examine(message)
            case wire.Welcome():
                self._link.run_id = message.run_id
                self._named_dir = message.run_dir
                self._watcher.repeat()
                self._orders.repeat()
            case wire.Halt():
                self._orders.run_dir = self._named_dir if self._link.is_own_directory(self._named_dir) else ""
                self._orders.hear(message.order)
            case wire.Notice(kind="verdict"):
                self._error_file.add(message.text)
            case wire.Notice(kind="closing"):
                self._close_status()
                self._last_line.say(message.text)
            case wire.Notice():
                self._give_notice(message.text)
        return None

    def _close_status(self) -> None:
        """Give the row of the live line back, because what follows is the last output."""
        if self._status is not None:
            self._status.close()
            self._status = None

    def _give_notice(self, text: str) -> None:
        """Write into the job's own log.

        The rank does so at its next step; for a rank that stands still, the sidecar does.
        """
        is_standing = self._watcher.is_standing or self._orders.is_standing
        if is_standing and say_in_job_log(self._process.pid, text):
            return
        self._page.post_notice(text)
        if self._status is not None and self._has_ended:
            self._status.say(f"holter: {text}")

    def _examine(self, asked: wire.Examine) -> wire.Upward | None:
        if not self._has_ended:
            self._watcher.examine(asked.asked_ns, asked.depth)
            return None
        # Goodbye may have been sent already: after it only answers are sent.
        left = self._observed(self._watcher.of_the_dead(asked.asked_ns))
        return wire.Report(heartbeat=None, observations=[left], dropped=self.dropped)

    async def _say_how_it_ended(self) -> None:
        self._has_ended = True
        while self._turn():
            pass
        if not self._link.is_known and self._settings.bootstrap_fd >= 0:
            # It ended almost at once; the coordinator's address may still lie in the pipe.
            await asyncio.sleep(BOOTSTRAP_PATIENCE_S)
        ending = await self._ending()
        await self._watcher.last_words(is_orderly=ending.exit_code == 0)
        heartbeat = self._page.heartbeat()
        self._tell(
            Exited(
                pid=self._process.pid,
                exit_code=ending.exit_code,
                signal=ending.signal,
                out_of_memory=self._process.was_out_of_memory(),
                last_step=heartbeat.step if heartbeat else 0,
                last_phase=Phase(heartbeat.phase) if heartbeat else Phase.ATTACH,
                farewell=self._farewell,
            ),
            urgent=True,
        )
        logger.info("rank %d ended: exit code %s, signal %s", self.rank, ending.exit_code, ending.signal)
        if ending.exit_code != 0:
            await self._watcher.look_at_its_device()
        await self._link.close(GOODBYE_DEADLINE_S)
        self._close_status()
        steps = heartbeat.step if heartbeat else 0
        how = "no coordinator answered, so nobody can say whether all was well"
        if self._named_dir:
            how = f"others had not by then, or the coordinator was busy; how the run ended: holter report {self._named_dir}"
        self._last_line.say(f"rank {self.rank} ended after {steps} steps; {how}")

    async def _ending(self) -> ProcessEnding:
        deadline = clock.monotonic_s() + ENDING_PATIENCE_S
        while clock.monotonic_s() < deadline:
            ending = self._process.ending()
            if ending is not None:
                return ending
            await asyncio.sleep(0.005)
        return ProcessEnding(None, None)

    def _scrape(self, accept: str) -> tuple[bytes, str]:
        rank = self._state.snapshot(
            self.dropped,
            self._watcher.device,
            is_coordinator_there=self._link.is_connected,
            is_unwatched=self._link.is_unwatched(clock.monotonic_s()),
        )
        # While the run has no name, the rank's series would belong to no run.
        metrics = families(self._link.run_id, self._settings.version, [rank] if self._link.run_id else [])
        return expose(metrics, accept)

    def _health(self) -> dict[str, object]:
        return {"ok": True, "rank": self.rank, "coordinator": self._link.is_connected}


class TableHistory:
    """Keeps the last steps' fingerprints by (class, step), for the coordinator to ask for later; bounded in bytes."""

    def __init__(self, max_bytes: int = MAX_TABLE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._tables: OrderedDict[tuple[str, int], NamedTable] = OrderedDict()
        self._names: Names = {"parameters": [], "buffers": []}
        self._parts: dict[int, Census] = {}

    def learn_census(self, census: Census) -> None:
        """Take in the names, in the order of the tables."""
        if census.part == 0:
            self._parts = {}
        self._parts[census.part] = census
        if len(self._parts) == census.parts:
            entries = [entry for part in sorted(self._parts) for entry in self._parts[part].entries]
            self._names = {
                "parameters": [entry.name for entry in entries if not entry.is_buffer],
                "buffers": [entry.name for entry in entries if entry.is_buffer],
            }

    def keep(self, observation: Observation) -> None:
        """Keep a table with the names as they are now, because the next census may have others."""
        table = observation.body
        assert isinstance(table, PackedTable)
        key = (table.tensor_class, observation.step)
        self._forget(key)
        self._num_bytes += _size(table)
        self._tables[key] = (observation, self._names)
        while self._num_bytes > self._max_bytes and len(self._tables) > 1:
            self._forget(next(iter(self._tables)))

    def table(self, tensor_class: str, step: int) -> Observation | None:
        """Return the table with its names; None if it was dropped, or the names are not known."""
        kept = self._tables.get((tensor_class, step)) or self._unchanged(tensor_class, step)
        if kept is None:
            return None
        observation, names_then = kept
        packed = observation.body
        assert isinstance(packed, PackedTable)
        fingerprints = _unpack(packed.fingerprints, "Q")
        # Buffers are read before the census of their step is reported.
        fitting = (_names(packed, names) for names in (names_then, self._names))
        names = next((found for found in fitting if len(found) == len(fingerprints)), None)
        if names is None:
            return None
        body = Table(
            tensor_class=tensor_class,
            root=packed.root,
            names=names,
            fingerprints=fingerprints,
            norms=_unpack(packed.norms, "f"),
            sums=_unpack(packed.sums, "d"),
            marks=list(packed.marks),
        )
        return Observation(rank=observation.rank, step=step, at_ns=observation.at_ns, body=body)

    def _unchanged(self, tensor_class: str, step: int) -> NamedTable | None:
        """Return the last table before this step, for hyper-parameters: they are reported only when they change."""
        steps = [at for kept, at in self._tables if kept == tensor_class and at < step]
        found = self._tables[tensor_class, max(steps)] if steps else None
        table = found[0].body if found is not None else None
        return found if isinstance(table, PackedTable) and table.names else None

    def _forget(self, key: tuple[str, int]) -> None:
        kept = self._tables.pop(key, None)
        if kept is not None and isinstance(kept[0].body, PackedTable):
            self._num_bytes -= _size(kept[0].body)


def _names(packed: PackedTable, names: Names) -> list[str]:
    if packed.names:
        return packed.names
    own = names[packed.over]
    return [f"{name}.{key}" for key in packed.keys for name in own] if packed.keys else own


def _unpack(packed: bytes, form: str) -> list[Any]:
    return list(struct.unpack(f"<{len(packed) // struct.calcsize(form)}{form}", packed))


def _size(table: PackedTable) -> int:
    return len(table.fingerprints) + len(table.norms) + len(table.sums) + len(table.marks) + sum(map(len, table.names))
