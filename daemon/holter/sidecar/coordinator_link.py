"""The sidecar's link to the coordinator: it exists before the coordinator's address is known, and keeps observations until then.

    pipe from the rank --Bootstrap--> address, token, run     rank 0's sidecar also starts the coordinator and keeps it alive
    send, beat --> kept, at most MAX_UNSENT --> Uplink        once the address is known

Rank 0 binds the coordinator's listening socket, and its sidecar holds it: a coordinator that dies is started again on the
same address with the same token, and to its sidecars it seems only to have been slow.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holter import clock
from holter.files import UNREADABLE, read_json
from holter.page import PageIdentity
from holter.records import Observation
from holter.sidecar import spawn
from holter.sidecar.host_agent import through_agent
from holter.transport import wire
from holter.transport.access import is_same
from holter.transport.interface import OnMessage
from holter.transport.limits import settings_for
from holter.transport.tls import NO_TLS, TlsFiles
from holter.transport.uplink import RankUplink

MAX_UNSENT = 5000
"""Number of observations kept while no coordinator is known yet."""
SHORT_LIFE_S = 60.0
"""Seconds: after a coordinator that lived longer than this, the next restart waits only the shortest pause again."""
PAUSES_S = (0.5, 0.5, 1.0, 2.0, 4.0, 4.0, 8.0, 8.0, 8.0, 8.0, 60.0)
"""Seconds to wait before the coordinator is started again, by the number of short lives in a row. It has no end: nobody
else would start it."""
UNWATCHED_S = 9.0
"""Seconds without contact after which the coordinator is reported missing, so that an unwatched rank's user knows
within ten seconds."""
SILENT_S = 14.0
"""The same in seconds while the connection stands, when the coordinator or its host is stopped; a healthy one answers a
ping every ten seconds."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkSettings:
    """How the coordinator is reached."""

    tls: TlsFiles = NO_TLS
    credentials: str = ""
    """Path of the credentials file; empty if the network needs none."""
    agent: str = ""
    """The host's agent, as in the settings; empty: none is used."""


class CoordinatorLink:
    """Sends one rank's observations to the coordinator; `on_message` receives the coordinator's messages."""

    def __init__(
        self,
        identity: PageIdentity,
        on_message: OnMessage,
        log_to: Callable[[Path], None],
        ways: LinkSettings | None = None,
    ) -> None:
        self.run_id = ""
        self.run_dir = ""
        """Run directory as the job was told; empty until it is known."""
        self.metrics_address = ""
        """Address of this sidecar's metrics, reported to the coordinator."""
        self.num_dropped = 0
        """Number of observations for which there was no room before a coordinator was known."""
        self._identity = identity
        self._on_message = on_message
        self._log_to = log_to
        self._ways = ways or LinkSettings()
        self._token = ""
        self._key = secrets.token_hex(16)
        self._uplink: RankUplink | None = None
        self._unsent: list[tuple[Observation, bool]] = []
        self._heard_s = clock.monotonic_s()
        self._is_missing = False

    @property
    def refusal(self) -> str:
        """Why the coordinator last rejected this sidecar; empty if it did not."""
        return self._uplink.refusal if self._uplink is not None else ""

    def look(self, now_s: float) -> str | None:
        """Return a sentence when the coordinator has just gone missing or come back, otherwise None."""
        self._heard_s = max(self._heard_s, self._uplink.heard_s if self._uplink is not None else 0.0)
        was_missing, self._is_missing = self._is_missing, self.is_unwatched(now_s)
        if self._is_missing == was_missing:
            return None
        rank, why = self._identity.rank, f" ({self.refusal})" if self.refusal else ""
        if self._is_missing:
            return f"no coordinator has been heard for {now_s - self._heard_s:.0f} s: rank {rank} is not watched{why}. Training goes on"
        return f"the coordinator is back: rank {rank} is watched again"

    def is_unwatched(self, now_s: float) -> bool:
        """Whether no coordinator is judging what this rank reports."""
        return now_s - self._heard_s > (SILENT_S if self.is_connected else UNWATCHED_S)

    def is_own_directory(self, run_dir: str) -> bool:
        """Whether this is the directory of our own coordinator.

        It is if the job named it, or if our token lies in it, where only its owner can put it. Without this check, anything that
        answers at the coordinator's address could have ranks save wherever the job's user may write.
        """
        if not run_dir or run_dir == self.run_dir:
            return bool(run_dir)
        known = read_json(Path(run_dir) / "coordinator.json", dict)
        return known is not None and is_same(str(known.get("token", "")), self._token)

    @property
    def is_known(self) -> bool:
        """Whether the coordinator's address is known."""
        return self._uplink is not None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the coordinator now."""
        return self._uplink is not None and self._uplink.is_connected

    @property
    def clock(self) -> tuple[int, int]:
        """Offset of this host's clock from the coordinator's and the error of that, in nanoseconds; (0, 0) if unknown."""
        return (self._uplink.clock.offset_ns, self._uplink.clock.error_ns) if self._uplink is not None else (0, 0)

    def listen(self, loop: asyncio.AbstractEventLoop, descriptor: int, listen_fd: int) -> None:
        """Wait for the Bootstrap on this pipe, in the background, and connect when it has come."""
        os.set_blocking(descriptor, False)
        received = bytearray()

        def readable() -> None:
            chunk = os.read(descriptor, 65536)
            received.extend(chunk)
            if b"\n" in received or not chunk:
                loop.remove_reader(descriptor)
                os.close(descriptor)
                if b"\n" in received:
                    self._connect(bytes(received).partition(b"\n")[0], listen_fd)

        loop.add_reader(descriptor, readable)

    def send(self, observation: Observation, *, urgent: bool) -> None:
        """Send an observation, or keep it until the coordinator is known."""
        if self._uplink is not None:
            self._uplink.send(observation, urgent=urgent)
        elif len(self._unsent) < MAX_UNSENT:
            self._unsent.append((observation, urgent))
        else:
            self.num_dropped += 1

    def beat(self, heartbeat: wire.Heartbeat) -> None:
        """Report where the rank is now."""
        if self._uplink is not None:
            self._uplink.beat(heartbeat)

    def note_dropped(self, dropped: int) -> None:
        """Tell the uplink how many observations were lost before they reached it."""
        if self._uplink is not None:
            self._uplink.dropped_before = dropped

    async def close(self, deadline_s: float) -> None:
        """Send what is left, then Goodbye."""
        if self._uplink is not None:
            await self._uplink.close(deadline_s)

    def _connect(self, line: bytes, listen_fd: int) -> None:
        try:
            word = spawn.decode_bootstrap(line)
        except UNREADABLE as error:
            logger.error("what came through the job's store is not ours: %s", error)  # noqa: TRY400
            return
        who = self._identity
        self.run_id, self.run_dir, self._token = word.run_id, word.run_dir, word.token
        self._log_to(Path(word.run_dir) / "logs" / f"sidecar-{who.rank}.log")
        if word.starts_coordinator:
            arguments = ["--run-dir", word.run_dir, "--run-id", word.run_id, "--world-size", str(who.world_size)]
            arguments += ["--action", word.action, "--save-deadline-s", str(word.save_deadline_s)]
            # A restarted coordinator must go on from the same clock: its time must not go back.
            arguments += ["--clock-base-ns", str(clock.base_ns())]
            CoordinatorProcess(arguments=arguments, token=word.token, listen_fd=listen_fd).start()
        hello = wire.Hello(
            run_id=word.run_id,
            rank=who.rank,
            world_size=who.world_size,
            host=socket.gethostname(),
            rank_pid=who.pid,
            sidecar_pid=os.getpid(),
            metrics_address=self.metrics_address,
            key=self._key,
        )
        limits = settings_for(who.world_size, self._ways.tls, credentials=self._ways.credentials)
        limits = through_agent(limits, self._ways.agent, word, who.world_size)
        self._uplink = RankUplink(word.address, word.token, hello, self._on_message, limits)
        self._uplink.start()
        for observation, urgent in self._unsent:
            self._uplink.send(observation, urgent=urgent)
        self._unsent.clear()


class CoordinatorProcess:
    """The coordinator's process, started and kept alive by rank 0's sidecar."""

    def __init__(self, *, arguments: list[str], token: str, listen_fd: int) -> None:
        self._arguments = arguments
        self._token = token
        self._listen_fd = listen_fd
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the coordinator in the background."""
        self._task = asyncio.create_task(self._keep_alive(), name="coordinator")

    async def _keep_alive(self) -> None:
        num_short = 0
        while True:
            began_s = clock.monotonic_s()
            code = await self._run_once()
            if code == 0:
                logger.info("the coordinator ended")
                return
            num_short = 1 if clock.monotonic_s() - began_s > SHORT_LIFE_S else num_short + 1
            pause_s = restart_pause_s(num_short)
            logger.error("the coordinator ended with %s; it is started again in %g s", code, pause_s)
            await asyncio.sleep(pause_s)
            self._arguments = [*self._arguments, "--goes-on"] if "--goes-on" not in self._arguments else self._arguments

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "holter.cli", "coordinator", *self._arguments),
            *("--fd", str(self._listen_fd), "--token-file", "-"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(self._listen_fd,),
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(self._token.encode() + b"\n")
            await process.stdin.drain()
            process.stdin.close()
        return await process.wait()


def restart_pause_s(num_short_lives: int) -> float:
    """Return the seconds to wait after this many short lives in a row."""
    return PAUSES_S[min(num_short_lives, len(PAUSES_S)) - 1]
