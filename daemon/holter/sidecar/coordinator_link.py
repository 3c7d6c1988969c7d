"""The sidecar's link to the coordinator: it exists before the coordinator's address is known, and keeps what is said until then.

    pipe from the rank --Bootstrap--> address, token, run     rank 0's sidecar also starts the coordinator and keeps it alive
    send, beat --> kept, at most MAX_UNSENT --> Uplink        from then on

The coordinator's listening socket was bound by rank 0 and is held here: a coordinator that dies is started again on the same address with
the same token, and its sidecars find it as if it had only been slow.
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
"""Observations kept while no coordinator is known yet."""
SHORT_LIFE_S = 60.0
"""A coordinator that lived longer was not started in vain: the next pause is the shortest again."""
PAUSES_S = (0.5, 0.5, 1.0, 2.0, 4.0, 4.0, 8.0, 8.0, 8.0, 8.0, 60.0)
"""Before the coordinator is started again, by the number of short lives in a row; it never ends, since nobody else would start one."""
UNWATCHED_S = 9.0
"""A coordinator that has not been heard for so long is said to be missing: who is not watched again within ten seconds has been told so."""
SILENT_S = 14.0
"""The same for one whose line stands: it is stopped, or its host is; a healthy one answers a ping every ten seconds."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkSettings:
    """By which way the coordinator is reached."""

    tls: TlsFiles = NO_TLS
    credentials: str = ""
    """File of credentials, where the network wants some."""
    agent: str = ""
    """Of this host, as in the settings; empty: there is none."""


class CoordinatorLink:
    """Sends what one rank's sidecar has to say; `on_message` gets what the coordinator says."""

    def __init__(
        self,
        identity: PageIdentity,
        on_message: OnMessage,
        log_to: Callable[[Path], None],
        ways: LinkSettings | None = None,
    ) -> None:
        self.run_id = ""
        self.run_dir = ""
        """Of the run, as the job itself was told; empty until then."""
        self.metrics_address = ""
        """Of this sidecar; told to the coordinator."""
        self.num_dropped = 0
        """Observations for which there was no room before a coordinator was known."""
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
        """Why the coordinator last turned us away; empty: it did not."""
        return self._uplink.refusal if self._uplink is not None else ""

    def look(self, now_s: float) -> str | None:
        """A sentence when the coordinator has gone missing, and when it is back."""
        self._heard_s = max(self._heard_s, self._uplink.heard_s if self._uplink is not None else 0.0)
        was_missing, self._is_missing = self._is_missing, self.is_unwatched(now_s)
        if self._is_missing == was_missing:
            return None
        rank, why = self._identity.rank, f" ({self.refusal})" if self.refusal else ""
        if self._is_missing:
            return f"no coordinator has been heard for {now_s - self._heard_s:.0f} s: rank {rank} is not watched{why}. Training goes on"
        return f"the coordinator is back: rank {rank} is watched again"

    def is_unwatched(self, now_s: float) -> bool:
        """Whether nobody judges what this rank reports."""
        return now_s - self._heard_s > (SILENT_S if self.is_connected else UNWATCHED_S)

    def is_own_directory(self, run_dir: str) -> bool:
        """Whether this is the directory of the coordinator that we report to: the job was told so, or our token lies in it, where its owner alone can put it.

        Else whoever answers at the coordinator's address could have ranks save wherever the job's user may write.
        """
        if not run_dir or run_dir == self.run_dir:
            return bool(run_dir)
        known = read_json(Path(run_dir) / "coordinator.json", dict)
        return known is not None and is_same(str(known.get("token", "")), self._token)

    @property
    def is_known(self) -> bool:
        """Whether it is known where the coordinator is."""
        return self._uplink is not None

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator listens now."""
        return self._uplink is not None and self._uplink.is_connected

    @property
    def clock(self) -> tuple[int, int]:
        """Offset of this host's clock from the coordinator's, and its error, nanoseconds; (0, 0) where nobody knows."""
        return (self._uplink.clock.offset_ns, self._uplink.clock.error_ns) if self._uplink is not None else (0, 0)

    def listen(self, loop: asyncio.AbstractEventLoop, descriptor: int, listen_fd: int) -> None:
        """Wait for the Bootstrap on this pipe."""
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
        """Send one, or keep it until the coordinator is known."""
        if self._uplink is not None:
            self._uplink.send(observation, urgent=urgent)
        elif len(self._unsent) < MAX_UNSENT:
            self._unsent.append((observation, urgent))
        else:
            self.num_dropped += 1

    def beat(self, heartbeat: wire.Heartbeat) -> None:
        """Where the rank is now."""
        if self._uplink is not None:
            self._uplink.beat(heartbeat)

    def note_dropped(self, dropped: int) -> None:
        """How much was lost before it came here."""
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
            # One that is started again must not find that it is earlier than it was.
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
    """The coordinator's process, as its starter sees it."""

    def __init__(self, *, arguments: list[str], token: str, listen_fd: int) -> None:
        self._arguments = arguments
        self._token = token
        self._listen_fd = listen_fd
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the background."""
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
    """How long to wait after so many short lives in a row."""
    return PAUSES_S[min(num_short_lives, len(PAUSES_S)) - 1]
