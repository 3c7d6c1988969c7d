"""Reads a rank's Flight Recorder from outside: asks it, copies it now and then, and reports what is new in a copy.

`Recorder` asks through a unix socket of the rank, each question with a deadline. `flight` is answered by native threads and
therefore even by a rank whose main thread hangs or holds the interpreter lock; `is_lock_free` asks what only the
interpreter can answer. A stopped rank answers neither.

`Copies` keeps the newest copy, so that the last collectives of a rank that is killed are known. A copy costs a thread of the
rank some time, more if the recorder holds more calls: 64 ms for 2,000. The interval is at least 250 times that, 0.4 % of
one core: the next power of two, from half a second to sixteen. A rank that does not answer is asked less and less often.

    rank 0, every 8 s    0 . . . . . . . 8 . . . . . . . 16
    rank 1, every 16 s   0 . . . . . . . . . . . . . . . 16     by the coordinator's clock

Calls of two ranks can be compared only if both reported them, and the recorder of a busy job holds a few seconds. So copies
are made when the common clock shows a multiple of the interval: what one rank has is also in the copies of every rank that
copies as often or more often.

`TrafficLog` reports what is new in a small record: when the collectives of each step were entered, and digests of runs of
calls. Ranks do not agree beforehand on which calls to report, so the numbers themselves decide: of a step's calls, those
whose sequence number is a multiple of 1, 2, 4, ... until few enough remain; of many steps, the same by the step's number.
What one rank reports at a coarser rate, another reports at a finer one too. A call belongs to the step that ended next
after it.
"""

import asyncio
import contextlib
import logging
import math
import stat
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import aiohttp
import msgspec

from holter import clock
from holter.errors import RecorderError
from holter.flight import FlightError, blocks, from_json
from holter.records import Call, CallBlock, Flight, Observation, StepCalls, StepDone, Traffic
from holter.sidecar.host_clock import HostClock

MAX_BYTES = 64 << 20
"""The largest copy that is read: some 130,000 calls. A larger recorder must have been configured by hand."""
COSTS_KEPT = 4
QUESTION_PATIENCE_S = 3600.0
_PYTHON_SOCKET = "python"
"""Socket name, as in `rank.flight_server`, of a server in which an interpreter's thread answers everything, also a ping."""

COST_FACTOR = 250.0
OTHERS_S, CALL_S = 0.002, 40e-6
"""Seconds that a copy, and each call in it, is assumed to cost at most: on a busy machine most of the measured time
goes to other processes."""
MIN_COPY_INTERVAL_S = 0.5
MAX_COPY_INTERVAL_S = 16.0
TOO_SOON = 0.25
"""Share of the interval: a multiple that is nearer than this is skipped."""
logger = logging.getLogger(__name__)
MAX_STEP_CALLS = 16
"""Number of calls reported per step."""
MAX_STEPS = 64
"""Number of steps in one record."""
TELL_INTERVAL_S = 1.0
"""Seconds between reports of arrivals; digests, which are few, are reported at once."""
MAX_UNTOLD = 4096
"""Number of steps that are remembered until a copy holds their calls."""
MAX_STRIDE = 1 << 62
"""Limit for the stride: numbers that repeat, as 0 may, are told apart by no stride."""
_LINES_SOCKET = "lines"
_LINES = msgspec.json.Decoder(dict[int, tuple[str, ...]])
Item = TypeVar("Item")


class Recorder:
    """Asks one rank's recorder from outside."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._costs_s: deque[float] = deque(maxlen=COSTS_KEPT)
        self._question: asyncio.Task[bytes] | None = None
        self.host_clock = HostClock()
        """The recorder's calls have times of the host's clock, which somebody may set."""

    async def flight(self, deadline_s: float = 3.0) -> Flight:
        """Return a copy; raise RecorderError if there is none.

        It holds every call made before it was asked for, and perhaps some later ones.
        """
        began, asked_ns = clock.monotonic_s(), clock.wall_ns()
        data = await self._ask("fr_trace_json", deadline_s)
        try:
            flight = self.host_clock.of_run(from_json(data, asked_ns))
        except FlightError as error:
            raise RecorderError(f"the recorder's copy cannot be read: {error}") from error
        self._costs_s.append(clock.monotonic_s() - began)
        return flight

    async def call_lines(self, deadline_s: float = 1.0) -> dict[int, tuple[str, ...]]:
        """Return the script's lines by number of the newest calls; raise RecorderError. This needs the interpreter."""
        try:
            return _LINES.decode(await self._ask("call_lines", deadline_s, _lines_path(self._path)))
        except msgspec.MsgspecError as error:
            raise RecorderError(f"the lines of its calls cannot be read: {error}") from error

    @property
    def cost_s(self) -> float:
        """Seconds that a copy takes until it is parsed.

        The cheapest of the last few, because a busy machine can make any one late.
        """
        return min(self._costs_s) if len(self._costs_s) == COSTS_KEPT else 0.0

    async def is_lock_free(self, deadline_s: float = 1.0) -> bool | None:
        """Whether the interpreter answered in time; None if it could not be asked.

        A question that is not answered holds a thread of the rank's server, so there is never more than one: while an old one is
        open, that one is waited for instead.
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
        """Cancel an open question, and remove the socket that a killed rank left behind."""
        if self._question is not None:
            self._question.cancel()
            with contextlib.suppress(asyncio.CancelledError, RecorderError):
                await self._question
        remove(self._path)

    async def _ask(self, handler: str, deadline_s: float, path: str | None = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        connector = aiohttp.UnixConnector(path or self._path, force_close=True)
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
    """Read the exception, because asyncio logs one that nobody has read."""
    if not question.cancelled():
        question.exception()


def _lines_path(path: str) -> str:
    """Return the path of the socket that answers with the script's lines, beside torch's own."""
    return str(Path(path).with_name(_LINES_SOCKET))


def remove(path: str) -> None:
    """Remove the socket and its directory, if they still exist and nothing else lies in it."""
    socket = Path(path)
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(socket.lstat().st_mode):
            socket.unlink()
            beside = socket.with_name(_LINES_SOCKET)
            if beside.is_socket():
                beside.unlink()
            socket.parent.rmdir()


class Copies:
    """Keeps the newest copy of one rank's recorder."""

    def __init__(
        self, recorder: Recorder, tell: Callable[[Flight], None], common_ns: Callable[[], int] = clock.wall_ns
    ) -> None:
        self.last: Flight | None = None
        self.error = ""
        """Why the last attempt failed; empty if it gave `last`."""
        self.num_failures = 0
        """Number of failed attempts in a row."""
        self._recorder = recorder
        self._tell = tell
        self._common_ns = common_ns
        """A clock that all sidecars share, as well as they can."""
        self._copying: asyncio.Task[None] | None = None
        self._num_begun = 0

    async def run(self) -> None:
        """Copy at intervals until cancelled; never raises."""
        while True:
            await self.now()
            num_calls = len(self.last.calls) if self.last is not None else 0
            every_s = interval_s(self._recorder.cost_s, num_calls, self.num_failures)
            await asyncio.sleep(rest_s(self._common_ns(), every_s))

    async def now(self) -> None:
        """Make a copy that starts now or later; all callers in the meantime share it."""
        num_before = self._num_begun
        while self._is_under_way() or self._num_begun == num_before:
            if not self._is_under_way():
                self._copying = asyncio.create_task(self._copy(), name="recorder copy")
            assert self._copying is not None
            # Shielded, so that a caller who stops waiting does not cancel it for the others.
            await asyncio.shield(self._copying)

    def _is_under_way(self) -> bool:
        return self._copying is not None and not self._copying.done()

    async def close(self) -> None:
        """Cancel a copy that is under way."""
        if self._copying is not None:
            self._copying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._copying

    @property
    def taken_ns(self) -> int:
        """When the newest copy was taken; 0 if there is none."""
        return self.last.taken_ns if self.last is not None else 0

    def keep(self, flight: Flight) -> None:
        """Keep and report a copy, which may be one that the rank made itself."""
        self.last = flight
        self._tell(flight)

    async def _copy(self) -> None:
        self._num_begun += 1
        try:
            self.keep(await self._recorder.flight())
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
    """Return the seconds between copies, after a copy that took this long and had so many calls, or after so many failures."""
    believed_s = min(cost_s, OTHERS_S + CALL_S * num_calls)
    wanted_s = min(max(COST_FACTOR * believed_s, MIN_COPY_INTERVAL_S), MAX_COPY_INTERVAL_S)
    rounded_s = 2.0 ** math.ceil(math.log2(wanted_s))
    return min(rounded_s * 2.0 ** min(num_failures, 10), MAX_COPY_INTERVAL_S)


def rest_s(common_ns: int, every_s: float) -> float:
    """Return the seconds until the common clock shows a multiple of the interval, or the one after if the next is very near."""
    every_ns = round(every_s * 1e9)
    left_s = (every_ns - common_ns % every_ns) / 1e9
    return left_s if left_s >= TOO_SOON * every_s else left_s + every_s


@dataclass(frozen=True)
class _Ended:
    step: int
    at_ns: int
    data_s: float


class TrafficLog:
    """Reports what is new in each copy; remembers which steps and which blocks were reported."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=MAX_UNTOLD)
        self._told_until_ns = 0
        self._told_at_ns = 0
        self._told_blocks: dict[str, int] = {}

    def learn(self, observation: Observation) -> None:
        """Take in a step that ended; ignore everything else."""
        body, at_ns = observation.body, observation.at_ns
        if not isinstance(body, StepDone):
            return
        if self._ended:
            # Steps whose numbers came late from the device are reported together: the earlier one ended before this one began.
            last = self._ended[-1]
            self._ended[-1] = replace(last, at_ns=min(last.at_ns, at_ns - int(body.seconds * 1e9)))
        self._ended.append(_Ended(observation.step, at_ns, body.phase_seconds.get("data", 0.0)))

    def take(self, flight: Flight, clock_offset_ns: int = 0, clock_error_ns: int = 0) -> Traffic | None:
        """Return what is new since the last call; None if nothing is."""
        new_blocks = self._new_blocks(flight)
        is_due = flight.taken_ns - self._told_at_ns >= TELL_INTERVAL_S * 1e9
        steps = self._new_steps(flight) if is_due or new_blocks else []
        if not steps and not new_blocks:
            return None
        self._told_at_ns = flight.taken_ns
        chosen = [chosen_calls(calls) for _, calls in steps]
        base_ns = min((call.created_ns for calls in chosen for call in calls), default=flight.taken_ns)
        return Traffic(
            base_ns=base_ns,
            steps=[
                StepCalls(
                    ended.step,
                    ended.data_s,
                    [(call.group, call.sequence, (call.created_ns - base_ns) // 1000) for call in told],
                    last_numbers(calls),
                )
                for (ended, calls), told in zip(steps, chosen, strict=True)
            ],
            blocks=new_blocks,
            clock_offset_ns=clock_offset_ns,
            clock_error_ns=clock_error_ns,
        )

    def _new_steps(self, flight: Flight) -> list[tuple[_Ended, list[Call]]]:
        # A step that ended while the copy was made may have calls that are not in it.
        ended = list(takewhile(lambda end: end.at_ns <= flight.taken_ns, self._ended))
        if not ended:
            return []
        ends_ns = [end.at_ns for end in ended]
        of_step: dict[int, list[Call]] = defaultdict(list)
        for call in flight.calls:
            index = bisect_left(ends_ns, call.created_ns)
            if not call.is_p2p and index < len(ended) and call.created_ns > self._told_until_ns:
                of_step[index].append(call)
        self._told_until_ns = ends_ns[-1]
        for _ in ended:
            self._ended.popleft()
        chosen = thinned(of_step, MAX_STEPS, lambda index: ended[index].step)
        return [(ended[index], of_step[index]) for index in chosen]

    def _new_blocks(self, flight: Flight) -> list[CallBlock]:
        found = [block for block in blocks(flight) if block.block > self._told_blocks.get(block.group, -1)]
        for block in found:
            self._told_blocks[block.group] = max(block.block, self._told_blocks.get(block.group, -1))
        return found


def chosen_calls(calls: Iterable[Call]) -> list[Call]:
    """Choose at most `MAX_STEP_CALLS` of a step's calls, in the order in which they were entered.

    Every group is represented if there is room.
    """
    by_group: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_group[call.group].append(call)
    groups = chosen_groups(by_group)
    share = MAX_STEP_CALLS // max(1, len(groups))
    chosen = [call for name in groups for call in thinned(by_group[name], share, lambda call: call.sequence)]
    return sorted(chosen, key=lambda call: call.created_ns)


def last_numbers(calls: Iterable[Call]) -> dict[str, int]:
    """Return the highest sequence number of a step by group, for the groups that are reported."""
    lasts: dict[str, int] = {}
    for call in calls:
        lasts[call.group] = max(call.sequence, lasts.get(call.group, call.sequence))
    return {group: lasts[group] for group in chosen_groups(lasts)}


def chosen_groups(groups: Iterable[str]) -> list[str]:
    """Choose groups by a hash of the name, so that ranks that have only some groups in common choose these alike."""
    return sorted(groups, key=lambda name: crc32(name.encode()))[:MAX_STEP_CALLS]


def thinned(items: Iterable[Item], limit: int, number: Callable[[Item], int]) -> list[Item]:
    """Keep the items whose number is a multiple of the smallest power of two that leaves at most `limit`."""
    left, stride = list(items), 1
    while len(left) > limit and stride < MAX_STRIDE:
        stride *= 2
        left = [item for item in left if number(item) % stride == 0]
    return left[:limit]
