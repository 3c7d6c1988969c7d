"""Passes messages between the coordinator and the rank's halt agent: orders go down the socket, answers come up it.

    coordinator --Halt--> here --Order--> rank
    coordinator <--Halting (urgent)-- here <--Halting-- rank

A rank that cannot save itself has left on its page how its step began; this module writes that to disk, for the ranks that
save for it. And a rank that is lost (stopped, or with its interpreter's lock held) is killed here when the others leave.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from holter import clock
from holter.files import UNREADABLE, write_whole
from holter.halting.orders import refusal
from holter.page import PageReader
from holter.records import Halting, Observation, Order
from holter.sidecar.process import Process

NOBODY = 2**52
"""Number of a halt that was not ordered by a coordinator."""
MAX_BYTES = 1 << 20
WRITE_PATIENCE_S = 5.0

logger = logging.getLogger(__name__)

Tell = Callable[[Observation], None]


class Orders:
    """Passes one rank's orders and answers on, in a running event loop."""

    def __init__(self, page: PageReader, process: Process, tell: Tell, is_heard: Callable[[], bool]) -> None:
        self.run_dir = ""
        """The run directory; empty while it is not known, and then nothing is saved."""
        self._page = page
        self._process = process
        self._tell = tell
        self._is_heard = is_heard
        """Returns whether a coordinator is connected."""
        self._line: socket.socket | None = None
        self._last: Observation | None = None
        self._written: set[int] = set()
        """Numbers of halts for which the rank's rewinds were written, or are being written."""
        self._unwritten: list[asyncio.Event] = []

    @property
    def is_standing(self) -> bool:
        """Whether the rank stands on purpose and so is not overdue."""
        return self._state in ("held", "saving", "saved", "failed", "dying", "terminated")

    def listen(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        """Listen to the rank on this socket until it is gone."""
        self._line = socket.socket(fileno=descriptor)
        self._line.setblocking(False)
        loop.add_reader(descriptor, self._readable, loop)

    def repeat(self) -> None:
        """Send the rank's last state again, because a coordinator has connected."""
        if self._last is not None:
            self._tell(self._last)

    def hear(self, order: Order) -> None:
        """Pass an order of the coordinator on to the rank, unless it is refused."""
        who = self._page.identity
        why = refusal(order, rank=who.rank, world_size=who.world_size, run_dir=self.run_dir)
        if why is None and order.kind in ("commit", "rescue") and not self.run_dir:
            why = f"{order.directory!r} is not known to be the coordinator's own: its coordinator.json cannot be read here, or is another's"
        if why is not None:
            logger.error("an order is not obeyed: %s", why)
            return
        logger.info("ordered: %s, halt %d, step %d", order.kind, order.halt, order.step)
        # A snapshot's step began long ago and is no longer on the page: the rank itself writes how it began.
        if order.kind in ("commit", "rescue") and order.snapshot < 0 and order.halt not in self._written:
            self._written.add(order.halt)
            self._write_rewinds(order)
        if order.kind == "leave" and who.rank in order.lost:
            # Only in a halt that this process takes part in, not one from the rank's former life.
            if order.halt in self._written:
                self._end_rank()
            return
        self._send(order)

    async def close(self) -> None:
        """Wait until everything is written, at most `WRITE_PATIENCE_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_PATIENCE_S):
                for written in self._unwritten:
                    await written.wait()
        if self._line is not None:
            asyncio.get_running_loop().remove_reader(self._line.fileno())
            self._line.close()
            self._line = None

    @property
    def _state(self) -> str:
        return self._last.body.state if self._last is not None and isinstance(self._last.body, Halting) else ""

    def _send(self, order: Order) -> None:
        if self._line is None:
            return
        try:
            self._line.send(msgspec.msgpack.encode(order))
        except OSError as error:
            logger.warning("the rank does not take orders: %s", error)

    def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._line is not None
        try:
            said = self._line.recv(MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            loop.remove_reader(self._line.fileno())
            self._line.close()
            self._line = None
            return
        try:
            observation = msgspec.msgpack.decode(said, type=Observation)
        except UNREADABLE:
            logger.warning("the rank's halt agent sent what is no answer")
            return
        if not isinstance(observation.body, Halting) or observation.rank != self._page.identity.rank:
            return
        self._last = observation
        logger.info("the rank is %s (%s)", observation.body.state, observation.body.why)
        self._tell(observation)
        if observation.body.state in ("dying", "terminated") and not self._is_heard():
            # There is no coordinator to answer, so the rank need not wait.
            self._send(Order(halt=NOBODY, kind="abort", step=observation.step))

    def _write_rewinds(self, order: Order) -> None:
        """Write the page's rewinds, atomically; in a thread, because a disk may hang."""
        path = Path(order.directory) / "ranks" / f"{self._page.identity.rank}.msgpack"
        content = msgspec.msgpack.encode(self._page.rewinds())
        loop, written = asyncio.get_running_loop(), asyncio.Event()

        def write() -> None:
            failure = ""
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, content)
            except OSError as error:
                failure = error.strerror or str(error)
            # The loop may have ended, because a disk can hang for longer than anybody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_written, order, failure)
                loop.call_soon_threadsafe(written.set)

        self._unwritten.append(written)
        threading.Thread(target=write, name="holter-blobs", daemon=True).start()

    def _on_written(self, order: Order, failure: str) -> None:
        if not failure:
            return
        logger.error("how the step began cannot be written: %s", failure)
        rank = self._page.identity.rank
        if rank in order.lost:
            body = Halting(state="failed", halt=order.halt, why=f"its random states are not kept: {failure}")
            self._tell(Observation(rank=rank, step=order.step, at_ns=clock.wall_ns(), body=body))

    def _end_rank(self) -> None:
        logger.warning("the rank is lost and is ended now")
        with contextlib.suppress(OSError):
            if self._process.pidfd >= 0:
                signal.pidfd_send_signal(self._process.pidfd, signal.SIGKILL)
