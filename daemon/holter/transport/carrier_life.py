"""The life of a carrier, whatever it goes over: connect, converse, wait, connect again, until the last word is said.

    start -> line -> Goodbye, answered -> closed
              ^__ backoff __|  at any failure; a rank for which another process speaks now waits longer

Nothing that happens on a line raises out of here. Deadlines are `asyncio.timeout`: Python 3.11's `wait_for` swallows a cancellation that comes together
with the result.
"""

import asyncio
import contextlib
import logging

from holter import clock
from holter.transport import wire
from holter.transport.clock_offset import ClockOffset
from holter.transport.interface import OnMessage
from holter.transport.limits import Backoff, UplinkSettings
from holter.transport.speech import Speech

CLOCK_FIRST = 4
"""Questions for the clock that are asked soon one after the other."""

logger = logging.getLogger(__name__)


class LineEndedError(Exception):
    """This line is over, with the reason; the next one may do better."""


class ReplacedError(LineEndedError):
    """Another process speaks for this rank now."""


class CarrierLife:
    """What every carrier is; it says how one line goes in `_live`, and what may end one in `_failures`."""

    def __init__(  # noqa: PLR0913, PLR0917 - a carrier's, and what sets it apart
        self,
        token: str,
        speech: Speech,
        on_message: OnMessage,
        settings: UplinkSettings | None,
        where: str,
        backoff: Backoff,
        keep_s: float,
    ) -> None:
        self.is_connected = False
        self.heard_s = 0.0
        self.reconnects = 0
        self.garbage = 0
        self.refusal = ""
        self.clock = ClockOffset()
        self._settings = settings or UplinkSettings()
        self._token, self._speech, self._on_message = token, speech, on_message
        self._where, self._backoff, self._keep_s = where, backoff, keep_s
        self._asks_clock = False
        self._clock_asked_s = 0.0
        self._wake, self._urgent, self._closing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._has_said_goodbye = False
        self._task: asyncio.Task[None] | None = None

    async def _live(self) -> bool:
        """One line, from its beginning to its end; True once Goodbye was said on it and the coordinator let go."""
        raise NotImplementedError

    def _failures(self) -> tuple[type[Exception], ...]:
        """What ends a line, and no more."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._speech.on_news = self._news
        self._speech.keep_s = self._keep_s
        self._speech.max_bytes = wire.MAX_FRAME_BYTES
        # What was said before is not kept waiting.
        self._urgent.set()
        self._task = asyncio.create_task(self._run(), name="carrier")

    async def stop(self) -> None:
        """Give up at once, without a word: another carrier goes on with the speech."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=self._settings.close_timeout_s)
        self.is_connected = False

    async def close(self, deadline_s: float) -> bool:
        """Say what is left, then Goodbye, and answer until the coordinator lets go; False when that could not be done in time."""
        for event in (self._closing, self._wake, self._urgent):
            event.set()
        if self._task is None:
            return False
        done, _ = await asyncio.wait({self._task}, timeout=deadline_s)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)
        return self._has_said_goodbye

    def _news(self, is_urgent: bool) -> None:  # noqa: FBT001 - fits `on_news`
        self._wake.set()
        if is_urgent:
            self._urgent.set()

    async def _run(self) -> None:
        """Connect until the last word is said."""
        while True:
            began_s, replaced_pause_s = clock.monotonic_s(), 0.0
            try:
                if await self._live():
                    self._has_said_goodbye = True
                    return
                reason = "the other side ended it"
            except ReplacedError as error:
                reason, replaced_pause_s = str(error), self._settings.replaced_pause_s
            except self._failures() as error:
                reason = f"{type(error).__name__}: {error}"
            except Exception:
                logger.exception("the line failed in a way nobody thought of")
                reason = "internal error"
            finally:
                self.is_connected = False
            logger.debug("line to %s: %s", self._where, reason)
            if clock.monotonic_s() - began_s >= self._settings.steady_after_s:
                self._backoff.attempts = 0
            await self._pause(replaced_pause_s or self._backoff.next_s())
            if replaced_pause_s and self._closing.is_set():
                return  # The last word is the other process's.
            self.reconnects += 1

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt; closing cuts it short."""
        if self._closing.is_set():
            await asyncio.sleep(min(seconds, self._settings.closing_pause_s))
            return
        await signalled(self._closing, seconds)

    async def _wait_for_news(self) -> bool:
        """Until there is something to say, for the shortest interval between two reports unless it is urgent; False: there is nothing."""
        await signalled(self._wake, self._settings.keepalive_s)
        has_news = self._wake.is_set()
        if has_news and not self._closing.is_set():
            await signalled(self._urgent, self._settings.report_interval_s)
        self._wake.clear()
        self._urgent.clear()
        return has_news

    def _learn_clock(self, told: wire.Welcome) -> None:
        """Whether both sides read the same one; a coordinator without a boot id does not know the question."""
        ours = self._speech.hello.boot_id
        self._asks_clock = told.boot_id not in ("", ours)
        if told.boot_id == ours:
            self.clock.be_same()

    def _is_clock_due(self) -> bool:
        """Whether to ask for it now."""
        limits, now_s = self._settings, clock.monotonic_s()
        self.clock.settle(limits.wall_ns())
        interval_s = limits.clock_first_s if self.clock.num_answers < CLOCK_FIRST else limits.clock_interval_s
        if not self._asks_clock or now_s - self._clock_asked_s <= interval_s:
            return False
        self._clock_asked_s = now_s
        return True

    def _tell(self, message: wire.Downward) -> wire.Upward | None:
        try:
            return self._on_message(message)
        except Exception:
            logger.exception("a message of the coordinator could not be handled")
            return None

    def _turned_away(self, reason: str) -> None:
        if reason != self.refusal:
            logger.warning("the coordinator at %s turned us away: %s", self._where, reason)
        self.refusal = reason


async def signalled(event: asyncio.Event, deadline_s: float) -> None:
    """Wait for it, but not for longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            await event.wait()
