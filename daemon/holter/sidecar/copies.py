"""Copies of the rank's recorder, now and then, so that a rank that is killed leaves its last collectives behind.

A copy costs a thread of the rank some time, more the more calls the recorder holds: 64 ms for 2,000. The interval is 250 times that and
more, 0.4 % of one core at that price: the next power of two, from half a second to sixteen. A rank that does not answer is asked less
and less often.

    rank 0, every 8 s    0 . . . . . . . 8 . . . . . . . 16
    rank 1, every 16 s   0 . . . . . . . . . . . . . . . 16     by the coordinator's clock

Calls of two ranks can be compared only where both told them, and the recorder of a busy job holds a few seconds. So copies are made
when the common clock shows a multiple of the interval: what one rank has, every rank has that copies as often or more often.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from holter import clock
from holter.records import Flight
from holter.sidecar.recorder import Recorder, RecorderError

COST_FACTOR = 250.0
OTHERS_S, CALL_S = 0.002, 40e-6
"""What a copy may be believed to cost, and each call in it: on a busy machine most of the time it takes is somebody else's."""
MIN_INTERVAL_S = 0.5
MAX_INTERVAL_S = 16.0
TOO_SOON = 0.25
"""Of the interval: a moment that is nearer than this is left out."""

logger = logging.getLogger(__name__)


class Copies:
    """The newest copy of one rank's recorder."""

    def __init__(
        self, recorder: Recorder, tell: Callable[[Flight], None], common_ns: Callable[[], int] = clock.wall_ns
    ) -> None:
        self.last: Flight | None = None
        self.error = ""
        """Why the last attempt gave nothing; empty: it gave `last`."""
        self.num_failures = 0
        """In a row."""
        self._recorder = recorder
        self._tell = tell
        self._common_ns = common_ns
        """A clock that all sidecars share, as well as they can."""
        self._copying: asyncio.Task[None] | None = None
        self._num_begun = 0

    async def run(self) -> None:
        """Until cancelled; never raises."""
        while True:
            await self.now()
            num_calls = len(self.last.calls) if self.last is not None else 0
            every_s = interval_s(self._recorder.cost_s, num_calls, self.num_failures)
            await asyncio.sleep(rest_s(self._common_ns(), every_s))

    async def now(self) -> None:
        """A copy that is begun from now on; all who ask meanwhile share it."""
        num_before = self._num_begun
        while self._is_under_way() or self._num_begun == num_before:
            if not self._is_under_way():
                self._copying = asyncio.create_task(self._copy(), name="recorder copy")
            assert self._copying is not None
            # Shielded: one who stops waiting does not take it from the others.
            await asyncio.shield(self._copying)

    def _is_under_way(self) -> bool:
        return self._copying is not None and not self._copying.done()

    async def close(self) -> None:
        """Break off what is under way."""
        if self._copying is not None:
            self._copying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._copying

    async def _copy(self) -> None:
        self._num_begun += 1
        try:
            self.last = await self._recorder.flight()
            self._tell(self.last)
        except RecorderError as error:
            self._fail(str(error))
        except Exception as error:
            logger.exception("a copy of the recorder was lost")
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self.error, self.num_failures = "", 0

    def _fail(self, why: str) -> None:
        self.error = why
        self.num_failures += 1


def interval_s(cost_s: float, num_calls: int, num_failures: int = 0) -> float:
    """How often to copy, after a copy that took this long and gave so many calls, or after so many failures."""
    believed_s = min(cost_s, OTHERS_S + CALL_S * num_calls)
    wanted_s = min(max(COST_FACTOR * believed_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
    rounded_s = 2.0 ** math.ceil(math.log2(wanted_s))
    return min(rounded_s * 2.0 ** min(num_failures, 10), MAX_INTERVAL_S)


def rest_s(common_ns: int, every_s: float) -> float:
    """Until the common clock shows a multiple of the interval; the one after, if that is only a moment away."""
    every_ns = round(every_s * 1e9)
    left_s = (every_ns - common_ns % every_ns) / 1e9
    return left_s if left_s >= TOO_SOON * every_s else left_s + every_s
