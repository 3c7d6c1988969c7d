"""What the sidecar knows of its rank right now, and where it shows that.

RankState       the latest values, for the terminal's line, an exam and a scrape
MetricsServer   /metrics and /healthz
StatusLine      one live line at the bottom of the launching terminal, below the script's own output and never in it
say_in_job_log  a sentence in the job's own log while the rank itself cannot write, because its main thread stands still
"""

import asyncio
import ctypes
import fcntl
import logging
import math
import os
import stat
import struct
import termios
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from aiohttp import web

from holter.exporters.snapshot import RankSnapshot, add_nonfinite
from holter.page import PageHeartbeat
from holter.records import Device, Observation, OnDevice, Phase, StepDone
from holter.transport.access import bearer, is_own_host, is_same, own_names
from holter.transport.tls import NO_TLS, SCHEME, TlsFiles

logger = logging.getLogger(__name__)
_PIDFD_GETFD = 438
_STDERR = 2
MAX_CONNECTIONS = 64
"""Number of connections to /metrics at once; a scraper or two need one each."""


class RankState:
    """The latest value of everything that the rank reports, and counters since the start."""

    def __init__(self, rank: int, hostname: str) -> None:
        self.seconds = 0.0
        self._learning_rate: float | None = None
        self._num_divided = 1
        self._last = RankSnapshot(rank=rank, hostname=hostname, step=0)

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._last.step or 0

    @property
    def loss(self) -> float | None:
        """The last reported loss."""
        return self._last.loss

    def learn(self, observation: Observation) -> None:
        """Take in a completed step, or which device the rank computes on."""
        done, last = observation.body, self._last
        if isinstance(done, OnDevice):
            self._last = replace(last, gpu_uuid=done.uuid)
        if not isinstance(done, StepDone):
            return
        self.seconds, self._num_divided = done.seconds, done.num_divided
        self._learning_rate = done.learning_rate if done.learning_rate is not None else self._learning_rate
        self._last = replace(
            last,
            step=observation.step + 1,
            loss=done.loss if done.loss is not None else last.loss,
            gradient_norm=done.gradient_norm if done.gradient_norm is not None else last.gradient_norm,
            overhead_ratio=done.overhead_ratio,
            steps=last.steps.add(done.seconds),
            nonfinite=dict(add_nonfinite(last.nonfinite, done)),
        )

    def learn_heartbeat(self, heartbeat: PageHeartbeat) -> None:
        """Take in where the main thread is."""
        self._last = replace(self._last, phase=Phase(heartbeat.phase), last_progress_s=heartbeat.at_ns / 1e9)

    def snapshot(
        self,
        dropped: int,
        device: Device | None = None,
        *,
        is_coordinator_there: bool | None = None,
        is_unwatched: bool | None = None,
    ) -> RankSnapshot:
        """Return the state for a scrape."""
        return replace(
            self._last,
            dropped=dropped,
            device=device,
            is_coordinator_there=is_coordinator_there,
            is_unwatched=is_unwatched,
        )

    def statistics(self) -> dict[str, float]:
        """Return the numbers of the rank's last report of a whole step; empty before the first."""
        if not self.step:
            return {}
        said = {
            "step": self.step - 1,
            "loss": self.loss,
            "gradient_norm": self._last.gradient_norm,
            "seconds": self.seconds,
            "learning_rate": self._learning_rate,
        }
        return {name: float(value) for name, value in said.items() if value is not None}

    def line(self) -> str:
        """Return the text of the terminal's line."""
        parts = [f" holter  step {self.step}"]
        if self._last.phase is not None:
            parts.append(self._last.phase.name.lower())
        if self.loss is not None:
            parts.append(loss_text(self.loss, self._num_divided))
        if self.seconds:
            parts.append(f"{self.seconds * 1e3:.0f} ms a step" if self.seconds < 1 else f"{self.seconds:.1f} s a step")
        if self._last.overhead_ratio is not None:
            parts.append(f"overhead {self._last.overhead_ratio:.1%}")
        return " · ".join(parts)


@dataclass(frozen=True)
class MetricsSettings:
    """The address at which a sidecar serves, TLS, and the token for reading."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles = NO_TLS
    read_token: str = ""
    """Token needed to read; empty if everybody who reaches the port may."""


def loss_text(loss: float, num_divided: int) -> str:
    """Format the loss that the script means; if it divides it over several backward passes, also the loss of each."""
    if not math.isfinite(loss):
        return "loss is not finite"
    if num_divided == 1:
        return f"loss {loss:.4g}"
    return f"loss {loss * num_divided:.4g} ({loss:.4g} in each of {num_divided} backward passes)"


class MetricsServer:
    """Serves on its port, or on a free one if that is taken.

    If there are very many connections, the oldest is closed, because each takes a descriptor that the watcher may need.
    """

    def __init__(
        self,
        settings: MetricsSettings,
        scrape: Callable[[str], tuple[bytes, str]],
        health: Callable[[], dict[str, object]],
    ) -> None:
        self._settings = settings
        self._scrape, self._health = scrape, health
        self._names = own_names()
        self._requests = web.Server(self._answer, access_log=None)
        self._listener: asyncio.Server | None = None
        self._connections: deque[asyncio.BaseProtocol] = deque()

    async def start(self) -> str:
        """Start and return `host:port`, after `https://` with TLS.

        Empty if no port can be had, which must not end the watching.
        """
        host, tls, loop = self._settings.host, self._settings.tls, asyncio.get_running_loop()
        for port in (self._settings.port, 0):
            try:
                self._listener = await loop.create_server(self._admit, host, port, ssl=tls.server())
            except OSError as error:
                logger.warning("cannot serve metrics on port %d: %s", port, error)
                continue
            return f"{SCHEME if tls.is_on else ''}{host}:{self._listener.sockets[0].getsockname()[1]}"
        return ""

    async def stop(self) -> None:
        """Close the port."""
        if self._listener is not None:
            self._listener.close()
        await self._requests.shutdown(1.0)

    def _admit(self) -> asyncio.BaseProtocol:
        while len(self._connections) >= MAX_CONNECTIONS:
            oldest = getattr(self._connections.popleft(), "transport", None)
            if oldest is not None:
                oldest.abort()
        handler = self._requests()
        self._connections.append(handler)
        return handler

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/healthz":
            return web.json_response(self._health())
        return self._metrics(request) if request.path == "/metrics" else web.Response(status=404, text="not found\n")

    def _metrics(self, request: web.BaseRequest) -> web.Response:
        token = self._settings.read_token
        if not is_own_host(request.host, self._names):
            return web.Response(status=421, text="no such host here\n")
        if token and not is_same(bearer(request.headers.get("Authorization", "")), token):
            return web.Response(status=401, text="a read token is needed\n", headers={"WWW-Authenticate": "Bearer"})
        body, content_type = self._scrape(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


class StatusLine:
    """One live line on a terminal device; any failure turns it off for good.

    The last row is taken out of the scrolling region while the job runs, as apt does for its progress bar, and given back at
    the end. The terminal is opened by its name, not inherited, and writing never waits.
    """

    def __init__(self, device: str) -> None:
        self._fd = -1
        self._size = (0, 0)
        try:
            self._fd = os.open(device, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError:
            return
        if not os.isatty(self._fd):
            os.close(self._fd)
            self._fd = -1

    def show(self, text: str) -> None:
        """Replace the line's text."""
        size = self._terminal_size()
        if size is None:
            return
        rows, columns = size
        reserve = ""
        if size != self._size:
            # A line feed first: if the cursor is on the last row, its text moves up instead of being covered.
            reserve = f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A"
            self._size = size
        self._write(f"{reserve}\x1b7\x1b[{rows};1H\x1b[7m{text[: columns - 1].ljust(columns - 1)}\x1b[0m\x1b8")

    def say(self, text: str) -> None:
        """Write lines above the status line that stay."""
        self._write("\r\x1b[K" + text.replace("\n", "\r\n") + "\r\n")

    def close(self) -> None:
        """Give the row back and close the terminal."""
        if self._fd >= 0 and self._size[0]:
            rows, _ = self._size
            self._write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[r\x1b8")
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _terminal_size(self) -> tuple[int, int] | None:
        if self._fd < 0:
            return None
        try:
            rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(self._fd, termios.TIOCGWINSZ, bytes(8)))
        except OSError:
            return None
        return (rows, columns) if rows > 2 and columns > 20 else None  # noqa: PLR2004

    def _write(self, text: str) -> None:
        if self._fd < 0:
            return
        try:
            os.write(self._fd, text.encode("utf-8", "replace"))
        except BlockingIOError:
            # Somebody pressed Ctrl-S: the line can wait.
            return
        except OSError:
            os.close(self._fd)
            self._fd = -1


def say_in_job_log(pid: int, text: str) -> bool:
    """Write one line to the standard error of a process; return whether that worked.

    It is opened for one write and closed again: no pipe of the launcher is kept open, and writing never waits. A plain file is
    written through the rank's own descriptor: what the rank writes later then comes after it, and does not overwrite it.
    """
    try:
        descriptor = _open_stderr(pid)
    except OSError:
        return False
    try:
        return os.write(descriptor, f"holter: {text}\n".encode("utf-8", "replace")) > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _open_stderr(pid: int) -> int:
    path = f"/proc/{pid}/fd/{_STDERR}"
    if stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - follows the link as an open would
        shared = _shared_stderr(pid)
        if shared >= 0:
            return shared
    # Anything else may be full: open a separate description, so that this write does not block and the rank's still do.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)


def _shared_stderr(pid: int) -> int:
    """Return a copy of the process's own open file, which shares its position; -1 if that is not permitted."""
    process = os.pidfd_open(pid)
    try:
        return int(ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, _STDERR, 0))
    finally:
        os.close(process)
