"""The sidecar's loop: page in, uplink out, one eye on the process.

page ring --read--> history (tables stay here) --> uplink (everything else) --> coordinator
pidfd ------------> the rank ended: read the rest, say how, say goodbye, end
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holter import clock
from holter.exporters import expose, families
from holter.page import CONTROL_NOTHING, CONTROL_THIN, PageReader
from holter.records import Body, Census, Exited, Farewell, Observation, PackedTable, Phase, StepDone
from holter.sidecar import bootstrap
from holter.sidecar.history import History
from holter.sidecar.metrics import MetricsServer
from holter.sidecar.process import Ending, Process
from holter.sidecar.state import RankState
from holter.sidecar.supervise import Coordinator
from holter.sidecar.terminal import StatusLine
from holter.transport import wire
from holter.transport.websocket import Uplink

POLL_S = 0.05
SHOW_S = 0.5
ENDING_PATIENCE_S = 1.0
"""How long an exit code is looked for after the process is gone."""
BOOTSTRAP_PATIENCE_S = 0.5
GOODBYE_DEADLINE_S = 10.0
RELAX_S = 60.0
MAX_UNSENT = 5000
"""Observations kept while no coordinator is known yet."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SidecarSettings:
    """What the rank tells on the command line."""

    page: int | str
    bootstrap_fd: int = -1
    listen_fd: int = -1
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    terminal: str = ""
    version: str = ""


class Sidecar:
    """Watches one rank until it has ended."""

    def __init__(self, settings: SidecarSettings, log_to: Callable[[Path], None]) -> None:
        self._settings = settings
        self._log_to = log_to
        self._page = PageReader.open(settings.page)
        identity = self._page.identity
        self.rank, self._world_size = identity.rank, identity.world_size
        self._process = Process(identity.pid, identity.started_ticks)
        self._state = RankState(self.rank, socket.gethostname())
        self._history = History()
        self._decoder = msgspec.msgpack.Decoder(Observation)
        self._unsent: list[tuple[Observation, bool]] = []
        self._num_unsent_dropped = 0
        self._num_undecodable = 0
        self._farewell: Farewell | None = None
        self._uplink: Uplink | None = None
        self._run_id = ""
        self._has_ended = False
        self._thinning, self._dropped_seen, self._thinned_at = 0, 0, 0.0
        self._line = StatusLine(settings.terminal) if settings.terminal else None
        self._metrics_address = ""

    async def run(self) -> None:
        """Until the rank has ended and everything was said."""
        self._page.beat(pid=os.getpid(), at_ns=clock.wall_ns())
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        if self._process.pidfd >= 0:
            loop.add_reader(self._process.pidfd, ended.set)
        else:
            ended.set()
        server = MetricsServer(self._settings.metrics_host, self._settings.metrics_port, self._scrape, self._health)
        self._metrics_address = await server.start()
        self._listen_for_bootstrap(loop)
        try:
            await self._watch(ended)
            if self._process.pidfd >= 0:
                loop.remove_reader(self._process.pidfd)
            await self._say_how_it_ended()
        finally:
            if self._line is not None:
                self._line.close()
            await server.stop()

    async def _watch(self, ended: asyncio.Event) -> None:
        shown_at = 0.0
        while not ended.is_set():
            self._turn()
            now = clock.monotonic_s()
            if self._line is not None and now - shown_at > SHOW_S and self._state.step:
                self._line.show(self._state.line())
                shown_at = now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), POLL_S)

    def _turn(self) -> int:
        """One look at the page; how many observations it gave."""
        self._page.beat(pid=os.getpid(), at_ns=clock.wall_ns())
        heartbeat = self._page.heartbeat()
        if heartbeat is not None:
            self._state.feel(heartbeat)
            if self._uplink is not None:
                self._uplink.beat(
                    wire.Heartbeat(heartbeat.step, Phase(heartbeat.phase), heartbeat.micro_step, heartbeat.at_ns)
                )
        payloads = self._page.read()
        for payload in payloads:
            self._take(payload)
        self._press_back()
        if self._uplink is not None:
            self._uplink.dropped_before = self.dropped
        return len(payloads)

    @property
    def dropped(self) -> int:
        """Observations lost between the rank and the uplink."""
        return self._page.dropped + self._page.torn + self._num_unsent_dropped + self._num_undecodable

    def _take(self, payload: bytes) -> None:
        try:
            observation = self._decoder.decode(payload)
        except msgspec.MsgspecError:
            self._num_undecodable += 1
            return
        body = observation.body
        if isinstance(body, PackedTable):
            self._history.keep(observation)
            return
        if isinstance(body, Census):
            self._history.learn_census(body)
        elif isinstance(body, Farewell):
            self._farewell = body
        self._state.learn(observation)
        self._send(observation, urgent=isinstance(body, StepDone) and bool(body.nonfinite))

    def _send(self, observation: Observation, *, urgent: bool) -> None:
        if self._uplink is not None:
            self._uplink.send(observation, urgent=urgent)
        elif len(self._unsent) < MAX_UNSENT:
            self._unsent.append((observation, urgent))
        else:
            self._num_unsent_dropped += 1

    def _press_back(self) -> None:
        """The ring overflows: the rank shall compare less often; relaxed step by step once it has stopped."""
        now = clock.monotonic_s()
        if self._page.dropped > self._dropped_seen:
            self._dropped_seen, self._thinned_at = self._page.dropped, now
            self._thinning = min(self._thinning + 1, 6)
        elif self._thinning and now - self._thinned_at > RELAX_S:
            self._thinning, self._thinned_at = self._thinning - 1, now
        else:
            return
        self._page.set_control(CONTROL_THIN if self._thinning else CONTROL_NOTHING, self._thinning)

    def _listen_for_bootstrap(self, loop: asyncio.AbstractEventLoop) -> None:
        descriptor = self._settings.bootstrap_fd
        if descriptor < 0:
            return
        os.set_blocking(descriptor, False)
        received = bytearray()

        def readable() -> None:
            chunk = os.read(descriptor, 65536)
            received.extend(chunk)
            if b"\n" in received or not chunk:
                loop.remove_reader(descriptor)
                os.close(descriptor)
                if b"\n" in received:
                    self._meet(bytes(received).partition(b"\n")[0])

        loop.add_reader(descriptor, readable)

    def _meet(self, line: bytes) -> None:
        try:
            word = bootstrap.decode(line)
        except msgspec.MsgspecError as error:
            logger.error("what came through the job's store is not ours: %s", error)  # noqa: TRY400
            return
        self._run_id = word.run_id
        self._log_to(Path(word.run_dir) / "logs" / f"sidecar-{self.rank}.log")
        if word.starts_coordinator:
            arguments = ["--run-dir", word.run_dir, "--run-id", word.run_id, "--world-size", str(self._world_size)]
            Coordinator(
                arguments=[*arguments, "--action", word.action], token=word.token, listen_fd=self._settings.listen_fd
            ).start()
        hello = wire.Hello(
            run_id=word.run_id,
            rank=self.rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            rank_pid=self._page.identity.pid,
            sidecar_pid=os.getpid(),
            metrics_address=self._metrics_address,
        )
        self._uplink = Uplink(f"http://{word.address}/ingest", word.token, hello, self._answer)
        self._uplink.start()
        for observation, urgent in self._unsent:
            self._uplink.send(observation, urgent=urgent)
        self._unsent.clear()

    def _answer(self, message: wire.Downward) -> wire.Upward | None:
        if isinstance(message, wire.Fetch):
            table = self._history.table(message.tensor_class, message.step)
            return wire.Fetched(request=message.request, observation=table)
        if isinstance(message, wire.Welcome):
            self._run_id = message.run_id
        if isinstance(message, wire.Notice):
            self._page.post_notice(message.text)
            if self._line is not None and self._has_ended:
                # The rank can no longer say it in its own log.
                self._line.say(f"holter: {message.text}")
        return None

    async def _say_how_it_ended(self) -> None:
        self._has_ended = True
        while self._turn():
            pass
        if self._uplink is None and self._settings.bootstrap_fd >= 0:
            # It ended almost at once; where the coordinator is may still lie in the pipe.
            await asyncio.sleep(BOOTSTRAP_PATIENCE_S)
        ending = await self._ending()
        heartbeat = self._page.heartbeat()
        body: Body = Exited(
            pid=self._process.pid,
            exit_code=ending.exit_code,
            signal=ending.signal,
            out_of_memory=self._process.was_out_of_memory(),
            last_step=heartbeat.step if heartbeat else 0,
            last_phase=Phase(heartbeat.phase) if heartbeat else Phase.ATTACH,
            farewell=self._farewell,
        )
        step = heartbeat.step if heartbeat else 0
        self._send(Observation(rank=self.rank, step=step, at_ns=clock.wall_ns(), body=body), urgent=True)
        logger.info("rank %d ended: exit code %s, signal %s", self.rank, ending.exit_code, ending.signal)
        if self._uplink is not None:
            await self._uplink.close(GOODBYE_DEADLINE_S)

    async def _ending(self) -> Ending:
        deadline = clock.monotonic_s() + ENDING_PATIENCE_S
        while clock.monotonic_s() < deadline:
            ending = self._process.ending()
            if ending is not None:
                return ending
            await asyncio.sleep(0.005)
        return Ending(None, None)

    def _scrape(self, accept: str) -> tuple[bytes, str]:
        metrics = families(self._run_id, self._settings.version, [self._state.snapshot(self.dropped)])
        return expose(metrics, accept)

    def _health(self) -> dict[str, object]:
        is_linked = self._uplink is not None and self._uplink.is_connected
        return {"ok": True, "rank": self.rank, "coordinator": is_linked}
