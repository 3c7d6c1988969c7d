"""`/api/v1/events`: the content of the page as server-sent events; first all of it, then what changes.

    paint ──▶ one frame for all ──▶ listener, listener, ...        a few times a second, fewer if frames are large
                                      └ one that falls behind is sent everything again later; one that stops reading is dropped

Nothing waits for a reader, and no more than a few frames are kept for one. Without a reader nothing is painted. A
reader who comes after the end is sent everything once, and told that it was the last.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol, Self

import msgspec
from aiohttp import web

from holter import clock
from holter.transport.access import oldest_of_busiest

MAX_LISTENERS = 64
INTERVAL_S = 0.5
"""Shortest time between two frames in seconds."""
BYTES_PER_S = 200_000
"""Largest rate to one listener, except for the first frame; after a large frame the next one comes later."""
MAX_SHARE = 0.05
"""Largest share of its time that the coordinator spends painting; a job of 16,000 ranks is painted less often."""
LONGEST_S = 5.0
"""Longest time between two frames in seconds, whatever they cost."""
BEAT_S = 10.0
"""Seconds without a frame after which a beat is sent, so that a quiet connection differs from a dead one."""
LOOK_S = 1.0
"""Seconds after which a reader that has gone is noticed, even if nothing is written to it."""
MAX_WAITING = 4
"""Number of frames kept for a listener that does not take them; after that it is sent everything again."""
SEND_DEADLINE_S = 20.0
RETRY_MS = 2000

logger = logging.getLogger(__name__)

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # Otherwise a proxy that collects a whole response before passing it on would pass nothing on.
    "X-Accel-Buffering": "no",
}


class PageContent(Protocol):
    """The content of the page at one moment."""

    def whole(self) -> dict[str, Any]:
        """Return everything, for a reader who has seen nothing yet."""

    def since(self, before: Self) -> dict[str, Any]:
        """Return what changed, for a reader who has seen the earlier content."""


class _Listener:
    """A reader, and the frames that wait for it."""

    def __init__(self) -> None:
        self.waiting: list[bytes] = []
        self.is_behind = True
        """Whether it must be sent everything."""
        self.is_lost = False
        """Whether its connection is to be closed, because the page can no longer be painted or others need the place;
        so the page does not look alive."""
        self.wake = asyncio.Event()

    def give(self, frame: bytes) -> None:
        if self.is_behind:
            return
        if len(self.waiting) >= MAX_WAITING:
            self.waiting.clear()
            self.is_behind = True
        else:
            self.waiting.append(frame)
        self.wake.set()


class EventStream:
    """All listeners of one run."""

    def __init__(self, paint: Callable[[], PageContent], now_ns: Callable[[], int] = clock.wall_ns) -> None:
        self.pushed_out = 0
        """Number of readers that had to make room for others."""
        self._paint = paint
        self._now_ns = now_ns
        self._listeners: dict[_Listener, str] = {}
        """Listeners with their address, oldest first."""
        self._picture: PageContent | None = None
        self._painter: asyncio.Task[None] | None = None
        self._ended: str | None = None
        """Why nothing more comes; None while the run lives."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer GET /api/v1/events, until the reader goes away or the run ends."""
        response = web.StreamResponse(headers=HEADERS)
        listener = _Listener()
        self._make_room()
        self._listeners[listener] = request.remote or ""
        try:
            await response.prepare(request)
            await self._serve(response, listener, request.transport)
        except (ConnectionError, TimeoutError):
            _hang_up(request)
        finally:
            self._listeners.pop(listener, None)
        return response

    def _make_room(self) -> None:
        """Disconnect the oldest reader of the address that has most of them; an open page reconnects by itself."""
        if len(self._listeners) >= MAX_LISTENERS:
            oldest = oldest_of_busiest(self._listeners)
            del self._listeners[oldest]
            self.pushed_out += 1
            oldest.is_lost = True
            oldest.wake.set()

    async def close(self, reason: str) -> None:
        """Send all readers the last state, and tell them that nothing more comes."""
        if self._listeners:
            self._try()
        self._ended = reason
        if self._painter is not None:
            self._painter.cancel()
            await asyncio.gather(self._painter, return_exceptions=True)
        for listener in self._listeners:
            listener.wake.set()

    async def _serve(
        self, response: web.StreamResponse, listener: _Listener, transport: asyncio.Transport | None
    ) -> None:
        await _write(response, f"retry: {RETRY_MS}\n\n".encode())
        if self._ended is None and (self._painter is None or self._painter.done()):
            self._painter = asyncio.create_task(self._work())
        spoke_s = clock.monotonic_s()
        while self._ended is None:
            for frame in self._due(listener):
                await _write(response, frame)
                spoke_s = clock.monotonic_s()
            if clock.monotonic_s() - spoke_s >= BEAT_S:
                await _write(response, b": still here\n" + _frame("beat", {"now": self._now_ms()}))
                spoke_s = clock.monotonic_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(BEAT_S, LOOK_S)):
                    await listener.wake.wait()
            listener.wake.clear()
            if transport is None or transport.is_closing() or listener.is_lost:
                return
        for frame in (*self._due(listener), _frame("end", {"reason": self._ended, "now": self._now_ms()})):
            await _write(response, frame)

    def _due(self, listener: _Listener) -> list[bytes]:
        """Return the frames that this listener is to be sent now."""
        if not listener.is_behind:
            frames, listener.waiting = listener.waiting, []
            return frames
        # All others move on to the same picture, so that the next change means the same for everyone.
        self._advance()
        assert self._picture is not None
        listener.is_behind = False
        # A page that is opened after the end must not look live for a moment.
        last = {} if self._ended is None else {"ended": self._ended}
        return [_frame("snapshot", self._picture.whole() | last)]

    def _now_ms(self) -> int:
        return self._now_ns() // 10**6

    async def _work(self) -> None:
        while self._listeners:
            began_s = clock.monotonic_s()
            size = self._try()
            painting_s = clock.monotonic_s() - began_s
            await asyncio.sleep(min(max(INTERVAL_S, size / BYTES_PER_S, painting_s / MAX_SHARE), LONGEST_S))
        self._picture = None

    def _try(self) -> int:
        """Paint; if that fails, close all connections, and readers that come again are told of it.

        Returns the size of the frame.
        """
        try:
            return self._advance()
        except Exception:
            logger.exception("the page's picture cannot be made")
            self._picture = None
            for listener in self._listeners:
                listener.is_lost = True
                listener.wake.set()
            return 0

    def _advance(self) -> int:
        """Paint the content anew and send what changed; return the size of the frame."""
        before, self._picture = self._picture, self._paint()
        changes = self._picture.since(before) if before is not None else {}
        if not changes:
            return 0
        frame = _frame("delta", changes)
        for listener in self._listeners:
            listener.give(frame)
        return len(frame)


def _frame(name: str, content: Any) -> bytes:
    # JSON has no line breaks, so that one data line holds all of it; NaN and Inf become null.
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"


async def _write(response: web.StreamResponse, frame: bytes) -> None:
    async with asyncio.timeout(SEND_DEADLINE_S):
        await response.write(frame)


def _hang_up(request: web.Request) -> None:
    """Close the connection at once, without waiting for data that the reader has not taken."""
    if request.transport is not None:
        request.transport.abort()
