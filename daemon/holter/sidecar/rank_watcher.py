"""Watches one rank: its progress, its process, its device and its recorder; reports what is new.

every turn      heartbeat ─▶ watch ─▶ Overdue, at once
twice a second  /proc ─▶ process state, for the watch; the device's readings
now and then    recorder ─▶ copy ─▶ Traffic
when asked      Examine ─▶ Exam; also made without being asked when the rank crashes or ends

A rank that crashes says so on a socket (the other half is `rank/csrc/crash_notice.c`), and waits up to a second and a half
for our answer before it dies: it is examined while all its other threads still run, and then acknowledged, so that it waits
no longer than it must.
"""

import asyncio
import contextlib
import logging
import os
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from holter import clock
from holter.flight import FlightError, from_json
from holter.page import PageHeartbeat, PageIdentity
from holter.records import (
    LEFT,
    Body,
    Census,
    Device,
    Exam,
    ExamDepth,
    Farewell,
    Flight,
    Groups,
    LastCalls,
    Observation,
    OnDevice,
    Preparing,
    ProcessState,
    StepDone,
)
from holter.sidecar.devices import Devices
from holter.sidecar.examination import Examiner, Reason
from holter.sidecar.process import Process
from holter.sidecar.progress import Deadlines, ProgressWatch
from holter.sidecar.recorder import Copies, Recorder, TrafficLog
from holter.sidecar.state import RankState

LOOK_S = 0.5
MAX_EXAMS = 8
"""Number of exams that may be under way at the same time."""
PEERS_S = 0.6
"""Seconds for which a crashing rank is kept alive while its peers are examined; it waits 1.5 s at most."""
EXAM_PATIENCE_S = 2.0
"""Seconds to wait for exams that are under way when the rank ends."""

logger = logging.getLogger(__name__)
_WORD = struct.Struct("=ii")


class RankWatcher:
    """Follows one rank; `tell` is called with each new record, and whether it is urgent."""

    def __init__(  # noqa: PLR0913 - what it watches, and with what
        self,
        who: PageIdentity,
        process: Process,
        state: RankState,
        tell: Callable[[Body, bool], None],
        *,
        clock_error: Callable[[], tuple[int, int]],
        devices: Devices,
    ) -> None:
        self._process = process
        self._tell = tell
        self._clock_error = clock_error
        """Returns (offset, error) of this host's clock against the coordinator's, in nanoseconds."""
        self._deadlines = Deadlines()
        self._watch = ProgressWatch(self._deadlines)
        self._examiner = Examiner(who.rank, who.world_size, process, self._watch, state)
        self._traffic = TrafficLog()
        self._devices = devices
        self._seen: ProcessState | None = None
        self._looked_s = -LOOK_S
        self._recorder: Recorder | None = None
        self._copies: Copies | None = None
        self._has_stepped = False
        self._num_left = 0
        """Number of calls that are only in the last copy, which the rank itself left."""
        self._crashes: CrashListener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._exams: set[asyncio.Task[None]] = set()

    def start(self, recorder: str, crash_fd: int) -> None:
        """Begin to copy the recorder that listens at this path, and to listen for a crash; needs a running event loop."""
        if recorder:
            self._recorder = Recorder(recorder)
            self._copies = Copies(self._recorder, self._on_copy, lambda: clock.wall_ns() + self._clock_error()[0])
            self._examiner.use(self._recorder, self._copies)
            self._spawn(self._copies.run(), "recorder copies", self._tasks)
        if crash_fd >= 0:
            self._crashes = CrashListener(crash_fd)
            self._crashes.listen(asyncio.get_running_loop(), self._on_crash)

    @property
    def is_standing(self) -> bool:
        """Whether the rank is reported as not moving on."""
        return self._watch.is_standing

    @property
    def device(self) -> Device | None:
        """The device's last reading."""
        return self._devices.latest

    def learn(self, observation: Observation) -> None:
        """Take in what the rank reports about itself."""
        match observation.body:
            case StepDone() as done:
                self._devices.assume()
                self._deadlines.learn_step(observation.step, done, clock.monotonic_s())
                if self._copies is not None and not self._has_stepped:
                    # The first copy had the calls of the setup; a rank that is killed soon after would leave no other.
                    self._has_stepped = True
                    self._spawn(self._copies.now(), "copy after the first step", self._tasks)
            case Census() as census:
                self._deadlines.learn_census(census)
            case Farewell(text=text) if text != LEFT:
                self._deadlines.learn_farewell()
            case OnDevice() as on:
                self._devices.learn(on.uuid)
            case Preparing() as made_ready:
                self._deadlines.learn_preparing(clock.monotonic_s(), is_over=made_ready.is_over)
            case Groups() as told:
                self._examiner.learn(told.groups)
        self._traffic.learn(observation)

    def look(self, beat: PageHeartbeat | None, *, is_excused: bool = False) -> None:
        """Take one turn; a rank that stands because it was ordered to is excused from being overdue."""
        now_s = clock.monotonic_s()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s, self._seen = now_s, self._examiner.look(now_s) or self._seen
            for news in self._devices.poll(now_s):
                self._tell(news, True)
        overdue = None if is_excused else self._watch.look(beat, self._seen, now_s)
        if overdue is not None:
            logger.info("%s in %s: %s", overdue.tier, overdue.phase.name.lower(), overdue.because)
            self._tell(overdue, True)
            if self._copies is not None and overdue.tier == "suspect":
                self._spawn(self._copies.now(), "copy on suspicion", self._tasks)

    def repeat(self) -> None:
        """Report the present standstill again, because a coordinator has connected and may have missed it."""
        standing = self._watch.again(clock.monotonic_s())
        if standing is not None:
            self._tell(standing, True)

    def examine(self, asked_ns: int, depth: ExamDepth) -> None:
        """Examine the rank in the background and report the result."""
        if len(self._exams) < MAX_EXAMS:
            self._spawn(self._answer(asked_ns, depth, "asked"), "exam", self._exams)
        else:
            logger.warning("%d examinations are under way: another one is not made", MAX_EXAMS)

    async def last_words(self, *, is_orderly: bool) -> None:
        """Report what is known of a rank that has ended, without asking it anything."""
        if self._exams:
            # Questions to a dead process fail at once.
            await asyncio.wait(self._exams, timeout=EXAM_PATIENCE_S)
        left = self._exams | self._tasks
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        if self._copies is not None and self._recorder is not None:
            await self._copies.close()
            await self._recorder.close()
        if self._crashes is not None:
            self._crashes.close()
        for news in () if is_orderly else self._devices.before_the_end(clock.monotonic_s()):
            self._tell(news, True)
        self._tell(self.of_the_dead(0, is_orderly=is_orderly), True)

    async def look_at_its_device(self) -> None:
        """Report errors of the dead rank's device, which may be the cause; called when the death itself has been reported."""
        for news in await self._devices.after_the_end(clock.monotonic_s):
            self._tell(news, True)

    def hear_last_calls(self, left: LastCalls, at_ns: int) -> None:
        """Take in the copy of its recorder that a rank left before its end."""
        try:
            flight = from_json(left.dump, at_ns)
            flight = flight if self._recorder is None else self._recorder.host_clock.of_run(flight)
        except FlightError as error:
            logger.warning("what the rank left of its recorder cannot be read: %s", error)
            return
        if not left.is_orderly:
            self._tell(self._examiner.of_last_calls(flight), True)
        elif self._copies is not None:
            self._num_left = sum(call.created_ns > self._copies.taken_ns for call in flight.calls)
            self._copies.keep(flight)

    def of_the_dead(self, asked_ns: int, *, is_orderly: bool = False) -> Exam:
        """Return the exam of a rank that has ended."""
        return self._examiner.of_the_dead(asked_ns, self._num_left if is_orderly else None)

    def _on_copy(self, flight: Flight) -> None:
        offset_ns, error_ns = self._clock_error()
        traffic = self._traffic.take(flight, offset_ns, error_ns)
        if traffic is not None:
            pressure = self._seen.pressure.get("cpu", 0.0) if self._seen is not None else 0.0
            self._tell(msgspec.structs.replace(traffic, pressure=pressure), False)

    def _on_crash(self, dying: "CrashingRank") -> None:
        logger.warning("a thread of the rank (%d) dies of signal %d", dying.thread, dying.signal)
        self._spawn(self._examine_crash(), "exam of a crash", self._exams)

    async def _examine_crash(self) -> None:
        """Examine a crashing rank, which waits until this is done."""
        try:
            await self._answer(0, "quick", "last_breath")
            # Its peers are examined meanwhile: when it is gone they fail too, and with them what they had called.
            await asyncio.sleep(PEERS_S)
        finally:
            if self._crashes is not None:
                self._crashes.acknowledge()

    async def _answer(self, asked_ns: int, depth: ExamDepth, reason: Reason) -> None:
        self._tell(await self._examiner.exam(asked_ns, depth, reason), True)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str, among: set[asyncio.Task[None]]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            among.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("%s failed: %s: %s", name, type(error).__name__, error)

        task = asyncio.create_task(work, name=name)
        among.add(task)
        task.add_done_callback(done)


@dataclass(frozen=True)
class CrashingRank:
    """What a crashing thread reports."""

    signal: int
    thread: int
    """The thread's id in the kernel."""


class CrashListener:
    """The sidecar's end of the socket on which a rank reports a crash."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._received = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, loop: asyncio.AbstractEventLoop, on_crash: Callable[[CrashingRank], None]) -> None:
        """Call `on_crash` for each crash, until the rank is gone."""
        os.set_blocking(self._descriptor, False)
        self._loop = loop
        loop.add_reader(self._descriptor, self._readable, on_crash)

    def acknowledge(self) -> None:
        """Let the crashing rank go."""
        # A rank that is gone or has waited long enough needs no answer.
        with contextlib.suppress(OSError):
            os.write(self._descriptor, b"!")

    def close(self) -> None:
        """Close the socket: a crash from now on waits for nobody."""
        if self._descriptor < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1

    def _readable(self, on_crash: Callable[[CrashingRank], None]) -> None:
        try:
            chunk = os.read(self._descriptor, 4096)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        self._received += chunk
        while len(self._received) >= _WORD.size:
            number, thread = _WORD.unpack_from(self._received)
            del self._received[: _WORD.size]
            on_crash(CrashingRank(number, thread))
