"""Examines a rank from outside: process, recorder, interpreter and stacks, each with its own deadline.

    process state ─┐
    recorder ──────┼─ at once, together      a part that cannot be had leaves its reason in its place
    interpreter ───┘
    stacks ───────────── when the interpreter has answered or not: py-spy may pause the rank, and a paused rank answers nothing

Native frames cost a second of one core, and longer on a busy host. An exam waits two seconds for them, and longer only
if its interpreter does not answer, because then only they show what the rank does. py-spy continues meanwhile, as long
as the rank stands still anyway, and the next exam contains what it found; all exams in that time share its answer.

Stacks come from py-spy, a program that reads another process's memory and therefore works on one that hangs:

    quick     without pausing the rank: some ten milliseconds; the only way with a stopped process
    native    through native code too: takes about a second of one core for a rank with torch, which is paused for most of it; so on
              suspicion only

If native frames cannot be had (no permission, a stopped process, a library without unwinding tables), quick stacks often
can: then the stacks are the quick ones, and the error says why.

A rank that has died cannot be asked: its exam has the last copy of its recorder, and what was last seen and reported.
"""

import asyncio
import contextlib
import re
import shutil
import sys
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from holter import clock
from holter.files import UNREADABLE
from holter.flight import trimmed, with_lines, with_members
from holter.page import PageHeartbeat
from holter.records import Exam, ExamDepth, Flight, Frame, Group, Phase, ProcessState, ThreadStack
from holter.sidecar.process import Process
from holter.sidecar.progress import ENDED, HALTED, ProgressWatch
from holter.sidecar.recorder import Copies, Recorder
from holter.sidecar.state import RankState

FLIGHT_S = 3.0
LOCK_S = 2.0
QUICK_S = 2.0
NATIVE_S, STANDING_NATIVE_S = 5.0, 15.0
"""Seconds that py-spy may take for native frames: of a rank that moves, and of one that stands still."""
NATIVE_PATIENCE_S, LOCKED_PATIENCE_S = 2.0, 8.0
"""Seconds for which an exam waits for native frames: if the interpreter answers, and if it does not."""
MOVING_S = 0.5
"""Seconds: a rank that moved within this time is not paused for native frames."""
NATIVE_REST = 100.0
"""A rank that does not stand still is not paused again for this many times the length of the last pause: we take at
most 1 % of its time."""
MIN_FRAMES, MAX_FRAMES, WORLD_FRAMES = 64, 8192, 262_144
"""Number of stack frames that are sent; the main thread's come first."""
MIN_CALLS, MAX_CALLS, WORLD_CALLS = 16, 2000, 16_384
"""Number of the recorder's calls that are sent. The sum over all ranks is bounded; calls that have not ended are always
sent."""
ORDERLY_CALLS, MAX_ORDERLY_CALLS = 32, 512
"""Number of calls sent for a rank that ended normally: at least so many, and at most so many of those that were not
reported before."""
CRASH_S = 1.0
"""Seconds for everything, while a crashing rank waits for us."""

Reason = Literal["asked", "last_breath"]
"""`last_breath`: the rank crashes, and waits for us. The word is stored in journals."""
Part = TypeVar("Part")
MAX_THREADS = 64
MAX_STACK_FRAMES = 128
MAX_ERROR_CHARS = 300
QUICK_ATTEMPTS = 3
"""More than one attempt, because a running rank may be read in the middle of a change."""
REAP_S = 2.0
_NATIVE_ENDINGS = (".c", ".cc", ".cpp", ".h", ".hpp", ".pyx", ".so")


class Examiner:
    """Examines one rank on request and at its death; keeps the last stacks."""

    def __init__(self, rank: int, world_size: int, process: Process, watch: ProgressWatch, state: RankState) -> None:
        self._rank = rank
        self._max_calls = max(MIN_CALLS, min(MAX_CALLS, WORLD_CALLS // max(1, world_size)))
        self._max_frames = max(MIN_FRAMES, min(MAX_FRAMES, WORLD_FRAMES // max(1, world_size)))
        self._process, self._watch, self._state = process, watch, state
        self._recorder: Recorder | None = None
        self._copies: Copies | None = None
        self._groups: dict[str, Group] = {}
        self._num_spies = 0
        self._quick_lock = asyncio.Lock()
        self._spying: asyncio.Task[None] | None = None
        """The task that takes native frames; it outlives the exam that began it."""
        self._native: _Native | None = None
        """The last native frames."""
        self._last_process: ProcessState | None = None
        """State of the process when it was last seen alive."""
        self._last_stacks: list[ThreadStack] = []
        self._last_stacks_s = 0.0
        self._paused_s, self._rest_until_s = 0.0, 0.0
        """When the rank was last paused for native frames, and until when it is not to be paused again."""

    @property
    def is_spying(self) -> bool:
        """Whether stacks are being taken, during which the process appears as traced."""
        return self._num_spies > 0

    def use(self, recorder: Recorder, copies: Copies) -> None:
        """Use this recorder and its copies from now on."""
        self._recorder, self._copies = recorder, copies

    def learn(self, groups: Iterable[Group]) -> None:
        """Take in the members of each group, as the rank reports them."""
        self._groups |= {group.name: group for group in groups}

    async def exam(self, asked_ns: int, depth: ExamDepth, reason: Reason) -> Exam:
        """Examine the rank, with every part that can be had; never raises."""
        process = self.look(clock.monotonic_s()) or self._last_process
        is_hurried = reason == "last_breath"
        (flight, flight_error), (is_lock_free, (taken, stack_error)) = await asyncio.gather(
            self._flight(process, CRASH_S if is_hurried else FLIGHT_S),
            self._inside(process, depth, is_hurried=is_hurried),
        )
        if flight is not None and is_lock_free:
            flight = with_lines(flight, await self._call_lines())
        return self._compose(
            asked_ns=asked_ns,
            depth="native" if _has_native(taken) else depth,
            reason=reason,
            process=process,
            stacks=taken,
            stack_error=stack_error,
            is_lock_free=is_lock_free,
            flight=flight,
            flight_error=flight_error,
        )

    def look(self, now_s: float) -> ProcessState | None:
        """Look at the process; None while stacks are being taken, which would make it appear traced."""
        if self.is_spying:
            return None
        seen = self._process.look(now_s)
        if seen.state not in ENDED:
            self._last_process = seen
        return seen

    def of_the_dead(self, asked_ns: int, num_left: int | None) -> Exam:
        """Return the exam of a dead rank, from what was last seen; the rank is not asked.

        For a rank that ended normally (`num_left` is not None), the last few calls are enough, and the `num_left` calls that
        were not reported before.
        """
        if self._spying is not None:
            self._spying.cancel()
        limit = MAX_CALLS if num_left is None else min(max(ORDERLY_CALLS, num_left), MAX_ORDERLY_CALLS)
        flight, flight_error = self._last_flight("", limit)
        error = "no stack was taken before it ended"
        if self._last_stacks:
            ago_s = clock.monotonic_s() - self._last_stacks_s
            error = f"taken {ago_s:.1f} s before its end was seen"
        return self._compose(
            reason="death",
            asked_ns=asked_ns,
            process=self._last_process,
            stacks=self._last_stacks,
            stack_error=error,
            flight=flight,
            flight_error=flight_error,
        )

    def of_last_calls(self, flight: Flight) -> Exam:
        """Return the exam of a rank that crashes and has itself left a copy of its recorder."""
        return self._compose(reason="last_breath", flight=trimmed(flight, self._rank, self._max_calls))

    def _compose(self, **parts: object) -> Exam:
        beat = self._watch.beat
        return Exam(
            phase=beat.phase if beat is not None else Phase.ATTACH,
            micro_step=beat.micro_step if beat is not None else 0,
            waited_s=self._watch.waited_s(clock.monotonic_s()),
            statistics=self._state.statistics(),
            **parts,  # type: ignore[arg-type]
        )

    async def _flight(self, process: ProcessState | None, deadline_s: float) -> tuple[Flight | None, str]:
        if self._copies is None:
            return self._last_flight("")
        if process is not None and process.state in HALTED:
            return self._last_flight(f"its process is {process.state} and cannot answer")
        error = await _in_time(self._copies.now(), deadline_s, "the recorder")
        return self._last_flight(error if isinstance(error, str) else self._copies.error)

    def _last_flight(self, error: str, limit: int = MAX_CALLS) -> tuple[Flight | None, str]:
        """Return the last copy, however old (it contains its time), and why there is no newer one."""
        if self._copies is None:
            return None, "this rank has no recorder that could be asked"
        last = self._copies.last
        if last is None:
            return None, error or self._copies.error or "no copy of the recorder was made yet"
        return trimmed(with_members(last, self._groups), self._rank, min(limit, self._max_calls)), error

    async def _inside(
        self, process: ProcessState | None, depth: ExamDepth, *, is_hurried: bool
    ) -> tuple[bool | None, tuple[list[ThreadStack], str]]:
        """Ask the interpreter first, then take the stacks; a crashing rank's interpreter is not asked."""
        if is_hurried:
            return None, await self._quick(CRASH_S)
        began_s = clock.monotonic_s()
        is_lock_free = await self._is_lock_free(process)
        patience_s = LOCKED_PATIENCE_S if is_lock_free is False else NATIVE_PATIENCE_S
        why_not = await self._await_native(began_s, patience_s, is_wanted=depth == "native")
        native = self._native
        if native is not None and native.had_s >= began_s:
            return is_lock_free, (native.stacks, native.error)
        taken, error = await self._quick(QUICK_S)
        if native is not None and self._is_still(native, taken):
            return is_lock_free, (native.stacks, native.error)
        return is_lock_free, (taken, error or (f"no native frames: {why_not}" if why_not else ""))

    async def _await_native(self, began_s: float, patience_s: float, *, is_wanted: bool) -> str:
        """Wait for native frames that are wanted or already being taken.

        Return why wanted ones are missing; empty if they are not.
        """
        now_s = clock.monotonic_s()
        if self._spying is None or self._spying.done():
            if not is_wanted or (self._native is not None and self._native.had_s >= began_s):
                return ""
            if why_not := self._spared(now_s):
                return why_not
            self._spying = asyncio.create_task(self._spy(), name="native frames")
        done, _ = await asyncio.wait({self._spying}, timeout=patience_s)
        return "" if done or not is_wanted else f"py-spy has not answered in {patience_s:g} s"

    async def _spy(self) -> None:
        """Take native frames; never raises."""
        beat, began_s = self._watch.beat, clock.monotonic_s()
        deadline_s = STANDING_NATIVE_S if self._watch.is_standing else NATIVE_S
        taken, error = await self._stacks("native", deadline_s)
        self._paused_s = clock.monotonic_s()
        self._rest_until_s = self._paused_s + NATIVE_REST * (self._paused_s - began_s)
        self._native = _Native(taken, error, beat, self._paused_s)

    def _is_still(self, native: "_Native", taken: list[ThreadStack]) -> bool:
        """Whether the rank still stands where native frames were taken, by its heartbeat and main thread's Python frames."""
        is_same_place = self._watch.is_standing and native.beat == self._watch.beat
        return is_same_place and _has_native(native.stacks) and _python(native.stacks) == _python(taken)

    def _spared(self, now_s: float) -> str:
        """Return why the rank must not be paused now, empty if it may; a rank that stands still always may."""
        if self._watch.waited_s(now_s) < MOVING_S:
            return "the rank moves, and is not to be paused"
        if not self._watch.is_standing and now_s < self._rest_until_s:
            return (
                f"it was paused for them {now_s - self._paused_s:.0f} s ago and does not stand still by its own measure"
            )
        return ""

    async def _call_lines(self) -> dict[int, tuple[str, ...]]:
        """Return the script's lines by number of call.

        Only asked if the interpreter has just answered, because an unanswered question blocks a thread of the rank.
        """
        assert self._recorder is not None
        found = await _in_time(self._recorder.call_lines(), LOCK_S, "the lines of its calls")
        return found if isinstance(found, dict) else {}

    async def _is_lock_free(self, process: ProcessState | None) -> bool | None:
        if self._recorder is None or (process is not None and process.state in HALTED):
            return None
        answer = await _in_time(self._recorder.is_lock_free(), LOCK_S, "the interpreter")
        return answer if isinstance(answer, bool) else None

    async def _quick(self, deadline_s: float) -> tuple[list[ThreadStack], str]:
        async with self._quick_lock:
            return await self._stacks("quick", deadline_s)

    async def _stacks(self, depth: ExamDepth, deadline_s: float) -> tuple[list[ThreadStack], str]:
        self._num_spies += 1
        try:
            taken, error = await take_stacks(self._process.pid, depth, deadline_s)
        finally:
            self._num_spies -= 1
        taken = bounded(taken, self._max_frames)
        if taken:
            self._last_stacks, self._last_stacks_s = taken, clock.monotonic_s()
        return taken, error


@dataclass(frozen=True)
class _Native:
    """Stacks with native frames, or those that were taken instead, with the reason."""

    stacks: list[ThreadStack]
    error: str
    beat: PageHeartbeat | None
    """The rank's last heartbeat when they were taken."""
    had_s: float


def _has_native(taken: list[ThreadStack]) -> bool:
    return any(frame.is_native for stack in taken for frame in stack.frames)


def _python(taken: list[ThreadStack]) -> list[tuple[str, str]]:
    """Return the functions that the main thread is in."""
    main = next((stack for stack in taken if stack.is_main), None)
    return [(frame.function, frame.file) for frame in main.frames if not frame.is_native] if main else []


def bounded(stacks: list[ThreadStack], max_frames: int) -> list[ThreadStack]:
    """Keep the first threads, and the innermost frames of the last of them, up to so many frames in all."""
    kept: list[ThreadStack] = []
    for stack in stacks:
        if max_frames <= 0:
            break
        kept.append(msgspec.structs.replace(stack, frames=stack.frames[:max_frames]))
        max_frames -= len(stack.frames)
    return kept


async def _in_time(part: Awaitable[Part], deadline_s: float, what: str) -> Part | str:
    """Await a part; return its result, or a sentence saying why there is none in time."""
    try:
        async with asyncio.timeout(deadline_s):
            return await part
    except TimeoutError:
        return f"{what} did not answer in {deadline_s:g} s"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the part's own and the others go on
        return f"{what} failed: {type(error).__name__}: {error}"


class _SpiedLocal(msgspec.Struct):
    """A local variable, as py-spy writes it: only those named in `_WORK` are looked at, and none are kept."""

    name: str
    repr: str | None = None


class _SpiedFrame(msgspec.Struct):
    """A frame, as py-spy writes it; only native frames have `module`, the name of the library."""

    name: str
    filename: str
    line: int = 0
    module: str | None = None
    locals: list[_SpiedLocal] | None = None


class _SpiedThread(msgspec.Struct):
    """A thread, as py-spy writes it."""

    pid: int
    os_thread_id: int | None = None
    thread_name: str | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[_SpiedFrame] = []


_DECODER = msgspec.json.Decoder(list[_SpiedThread])
_PIPELINING = "torch/distributed/pipelining/stage"
_WORK = {"fwd_chunk_id": "forward pass", "bwd_chunk_id": "backward pass"}
"""Argument of a pipeline stage's function -> what the stage computes."""


class _SpyError(Exception):
    """Raised when there are no stacks; the text says why in one sentence."""


async def take_stacks(pid: int, depth: ExamDepth, deadline_s: float = 5.0) -> tuple[list[ThreadStack], str]:
    """Return (stacks, error); both if only less than what was wanted could be had.

    Never raises, and leaves no child process behind.
    """
    # Prefer the py-spy beside the interpreter: it was installed with us.
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.is_file() else shutil.which("py-spy")
    if program is None:
        return [], "py-spy is not installed beside this interpreter nor on the PATH"
    ends_s = clock.monotonic_s() + deadline_s
    failures: list[str] = []
    # Leave time for quick stacks.
    attempts = [(["--native", "--locals"], 0.8 * deadline_s)] if depth == "native" else []
    # With local variables first: they contain a pipeline's micro-batch.
    attempts += [(["--nonblocking", "--locals"], 0.5 * deadline_s)]
    attempts += [(["--nonblocking"], deadline_s)] * QUICK_ATTEMPTS + [([], deadline_s)]
    for options, most_s in attempts:
        remaining_s = min(most_s, ends_s - clock.monotonic_s())
        if remaining_s <= 0:
            break
        try:
            stacks = await _dump(program, pid, options, remaining_s)
        except _SpyError as error:
            failures.append(f"no native frames: {error}" if "--native" in options else f"no stacks: {error}")
        else:
            return stacks, failures[0] if depth == "native" and failures else ""
    return [], "; ".join(dict.fromkeys([failures[0], failures[-1]]))


def parse_stacks(output: bytes) -> list[ThreadStack]:
    """Parse py-spy's JSON, main thread first; raise msgspec.MsgspecError if it is anything else."""
    stacks = [_stack(thread) for thread in _DECODER.decode(output)]
    return sorted(stacks, key=lambda stack: not stack.is_main)[:MAX_THREADS]


def _stack(thread: _SpiedThread) -> ThreadStack:
    return ThreadStack(
        name=thread.thread_name or "",
        is_main=thread.os_thread_id == thread.pid
        or (thread.os_thread_id is None and thread.thread_name == "MainThread"),
        owns_lock=thread.owns_gil,
        is_active=thread.active,
        frames=[
            Frame(frame.name, frame.filename, frame.line, is_native=_is_native(frame))
            for frame in thread.frames[:MAX_STACK_FRAMES]
        ],
        work=next((work for frame in thread.frames if (work := _work(frame))), ""),
    )


def _work(frame: _SpiedFrame) -> str:
    """Return what a stage of torch's pipelines computes in this frame; empty if the frame is not of one."""
    if _PIPELINING not in frame.filename:
        return ""
    held = {one.name: one.repr for one in frame.locals or ()}
    numbers = ((what, held.get(name) or "") for name, what in _WORK.items())
    return next((f"{what} of micro-batch {number}" for what, number in numbers if number.isdecimal()), "")


def _is_native(frame: _SpiedFrame) -> bool:
    return frame.module is not None or frame.filename.endswith(_NATIVE_ENDINGS) or ".so." in frame.filename


async def _dump(program: str, pid: int, options: list[str], deadline_s: float) -> list[ThreadStack]:
    try:
        child = await asyncio.create_subprocess_exec(
            program,
            *("dump", "--json", *options, "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise _SpyError(f"py-spy cannot be started: {error.strerror}") from None
    try:
        async with asyncio.timeout(deadline_s):
            output, complaint = await child.communicate()
    except TimeoutError:
        raise _SpyError(f"py-spy did not answer in {deadline_s:.1f} s") from None
    finally:
        # A rank whose tracer is killed is released by the kernel, and runs on.
        await _end(child)
    if child.returncode != 0:
        raise _SpyError(explain_complaint(complaint.decode("utf-8", "replace")))
    try:
        return parse_stacks(output)
    except UNREADABLE as error:
        raise _SpyError(f"py-spy's answer cannot be read: {error}") from None


async def _end(child: asyncio.subprocess.Process) -> None:
    """Kill the child if it lives, and reap it."""
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REAP_S):
            await child.wait()


def explain_complaint(complaint: str) -> str:
    """Return py-spy's complaint as one line: the error and its causes, without py-spy's own stack trace."""
    text = complaint.partition("Stack backtrace:")[0]
    lines = [re.sub(r"^(Error:|\d+:)\s*", "", line.strip()) for line in text.splitlines()]
    said = [line for line in dict.fromkeys(lines) if line and line != "Caused by:"]
    return ": ".join(said)[:MAX_ERROR_CHARS] or "py-spy failed without a word"
