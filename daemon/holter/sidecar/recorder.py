"""The outside half of the Flight Recorder's adapter: two questions over a unix socket of the rank, each with a deadline.

`flight` is answered by native threads and so by a rank whose main thread hangs or holds the interpreter lock; `is_lock_free` asks what
only the interpreter can answer. A rank that is stopped answers neither, and nobody waits for it longer than the deadline.
"""

import asyncio
import contextlib
import stat
from collections import deque
from pathlib import Path

import aiohttp

from holter import clock
from holter.errors import RecorderError
from holter.flight import FlightError, from_json
from holter.records import Flight

MAX_BYTES = 64 << 20
"""Some 130,000 calls; a recorder of more is set so by hand."""
COSTS_KEPT = 4
QUESTION_PATIENCE_S = 3600.0
_PYTHON_SOCKET = "python"
"""As `probes.flight` names it: a thread of the interpreter answers there, also to a ping."""


__all__ = ["Recorder", "RecorderError", "remove"]


class Recorder:
    """A rank's recorder, asked from outside."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._costs_s: deque[float] = deque(maxlen=COSTS_KEPT)
        self._question: asyncio.Task[bytes] | None = None

    async def flight(self, deadline_s: float = 3.0) -> Flight:
        """A copy; raises RecorderError. It holds all that was called before it was asked for, and perhaps some of what came later."""
        began, asked_ns = clock.monotonic_s(), clock.wall_ns()
        data = await self._ask("fr_trace_json", deadline_s)
        try:
            flight = from_json(data, asked_ns)
        except FlightError as error:
            raise RecorderError(f"the recorder's copy cannot be read: {error}") from error
        self._costs_s.append(clock.monotonic_s() - began)
        return flight

    @property
    def cost_s(self) -> float:
        """Of a copy, until it is here and understood: the cheapest of the last few, since a busy machine makes any one of them late."""
        return min(self._costs_s) if len(self._costs_s) == COSTS_KEPT else 0.0

    async def is_lock_free(self, deadline_s: float = 1.0) -> bool | None:
        """Whether the interpreter answered in time; None: it could not be asked.

        A question that is not answered holds a thread of the rank's server, so there is never more than one: while an old one is open,
        it is that one which is waited for.
        """
        question = self._question
        if question is None or question.done():
            if Path(self._path).name != _PYTHON_SOCKET:
                try:
                    await self._ask("ping", deadline_s)
                except RecorderError:
                    return None
            question = self._question = asyncio.create_task(self._ask("dump_traceback", QUESTION_PATIENCE_S))
            question.add_done_callback(_forget_error)
        await asyncio.wait({question}, timeout=deadline_s)
        if not question.done():
            return False
        return None if question.cancelled() or question.exception() is not None else True

    async def close(self) -> None:
        """Take back an open question, and remove the socket that a rank that was killed left behind."""
        if self._question is not None:
            self._question.cancel()
            with contextlib.suppress(asyncio.CancelledError, RecorderError):
                await self._question
        remove(self._path)

    async def _ask(self, handler: str, deadline_s: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        connector = aiohttp.UnixConnector(self._path, force_close=True)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.post(f"http://rank/handler/{handler}") as answer,
            ):
                if answer.status != 200:  # noqa: PLR2004
                    raise RecorderError(f"the rank's server answered {handler} with {answer.status}")
                return await _body(answer)
        except TimeoutError:
            raise RecorderError(f"the rank's server did not answer {handler} in {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RecorderError(f"the rank's server cannot be asked for {handler}: {error}") from None


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    received = bytearray()
    async for chunk in answer.content.iter_any():
        received += chunk
        if len(received) > MAX_BYTES:
            raise RecorderError(f"the recorder holds more than {MAX_BYTES >> 20} MB: set TORCH_FR_BUFFER_SIZE lower")
    return bytes(received)


def _forget_error(question: asyncio.Task[bytes]) -> None:
    """Looked at, so that nobody is told that it was not."""
    if not question.cancelled():
        question.exception()


def remove(path: str) -> None:
    """The socket and its directory, if they are still there and nothing else lies in it."""
    socket = Path(path)
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(socket.lstat().st_mode):
            socket.unlink()
            socket.parent.rmdir()
