"""`/api/v1/events`: the page's picture as server-sent events, the whole of it first, then what changed.

    paint ──▶ one frame for all ──▶ listener, listener, ...        a few times a second, fewer if frames are large
                                      └ one that does not keep up is shown the whole again when it does; one that stops taking is dropped

Nothing waits for a reader and nothing is kept for one beyond a few frames. Without a reader nothing is painted. Who comes after the end is shown
the whole once, and told that it was the last.
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
"""Between two frames."""
BYTES_PER_S = 200_000
"""To one listener, but for the first frame: after a large one the next comes later."""
MAX_SHARE = 0.05
"""Of its time the coordinator paints no more than this; a job of 16,000 ranks is painted less often."""
LONGEST_S = 5.0
"""A picture is sent at least this often, whatever it costs."""
BEAT_S = 10.0
"""A beat is sent this often where nothing else is, so that a quiet connection differs from a dead one."""
LOOK_S = 1.0
"""How soon it is noticed that a reader has gone, where nothing is written to it."""
MAX_WAITING = 4
"""Frames kept for a listener that does not take them; then it is shown the whole again."""
SEND_DEADLINE_S = 20.0
RETRY_MS = 2000

logger = logging.getLogger(__name__)

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # A proxy that collects a response before it passes it on would pass nothing on.
    "X-Accel-Buffering": "no",
}


class PageContent(Protocol):
    """What is shown, at one moment."""

    def whole(self) -> dict[str, Any]:
        """Everything, for a reader who has seen nothing yet."""

    def since(self, before: Self) -> dict[str, Any]:
        """What changed, for a reader who saw the picture before."""


class _Listener:
    """Who reads, and what waits for it."""

    def __init__(self) -> None:
        self.waiting: list[bytes] = []
        self.is_behind = True
        """It is to be shown the whole."""
        self.is_lost = False
        """The picture cannot be made any more, or others need the place: the connection is closed, so that the page does not look alive."""
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
        """Readers that made room for others."""
        self._paint = paint
        self._now_ns = now_ns
        self._listeners: dict[_Listener, str] = {}
        """By address, oldest first."""
        self._picture: PageContent | None = None
        self._painter: asyncio.Task[None] | None = None
        self._ended: str | None = None
        """Why nothing more comes, once that is so."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """GET /api/v1/events, until the reader goes away or the run ends."""
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
        """The oldest reader of the address that has most of them goes; a page that was open asks again by itself."""
        if len(self._listeners) >= MAX_LISTENERS:
            oldest = oldest_of_busiest(self._listeners)
            del self._listeners[oldest]
            self.pushed_out += 1
            oldest.is_lost = True
            oldest.wake.set()

    async def close(self, reason: str) -> None:
        """Tell all readers the last of it, and that nothing more comes."""
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
        """What this listener is to be sent now."""
        if not listener.is_behind:
            frames, listener.waiting = listener.waiting, []
            return frames
        # All others move on to the same picture, so that what changes next means the same for everyone.
        self._advance()
        assert self._picture is not None
        listener.is_behind = False
        # A page that comes after the end must not look live for a moment.
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
        """A picture that cannot be made ends all lines; whoever comes again is told that it fails."""
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
        """Paint anew and tell what changed; returns the size of the frame."""
        before, self._picture = self._picture, self._paint()
        changes = self._picture.since(before) if before is not None else {}
        if not changes:
            return 0
        frame = _frame("delta", changes)
        for listener in self._listeners:
            listener.give(frame)
        return len(frame)


def _frame(name: str, content: Any) -> bytes:
    # JSON has no line breaks, so that one line of data is all of it; NaN and Inf are null.
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"


async def _write(response: web.StreamResponse, frame: bytes) -> None:
    async with asyncio.timeout(SEND_DEADLINE_S):
        await response.write(frame)


def _hang_up(request: web.Request) -> None:
    """At once: what it has not taken is not waited for."""
    if request.transport is not None:
        request.transport.abort()
