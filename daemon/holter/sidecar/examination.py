"""A rank looked at from outside: process, recorder, interpreter and stacks, each with its own deadline.

    process state ─┐
    recorder ──────┼─ at once, together      a part that cannot be had leaves its reason in its place
    interpreter ───┘
    stacks ───────────── when the interpreter has answered or not: py-spy may pause the rank, and a paused rank answers nothing

Native frames cost a second of one core, and on a busy host that may last. An exam waits for them for two seconds, and longer only where
they alone can tell what the rank does: when its interpreter does not answer. py-spy goes on meanwhile, as long as the rank stands still
anyway, and the next exam brings what it found; all who ask while it works share its answer.

Stacks are py-spy's, a program that reads another process's memory, and so works on one that hangs:

    quick     without pausing the rank: some ten milliseconds; the only way with a stopped process
    native    through native code too: takes about a second of one core for a rank with torch, which is paused for most of it; so on
              suspicion only

What native cannot have (no permission, a stopped process, a library without unwinding tables) quick often can: then the stacks are the
quick ones, and the error says why.

Of a rank that has died nothing can be asked any more: there is the last copy of its recorder, and what was last seen and said.
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
"""How long py-spy may take for native frames: of any rank, and of one that stands still."""
NATIVE_PATIENCE_S, LOCKED_PATIENCE_S = 2.0, 8.0
"""How long an exam waits for them: if the interpreter answers, and if it does not."""
MOVING_S = 0.5
"""A rank that moved within this time is not paused for native frames."""
NATIVE_REST = 100.0
"""A rank that does not stand still is not paused again for so many times as long as the last pause took: at most 1 % of its time is ours."""
MIN_FRAMES, MAX_FRAMES, WORLD_FRAMES = 64, 8192, 262_144
"""Of stacks that are sent; the main thread's come first."""
MIN_CALLS, MAX_CALLS, WORLD_CALLS = 16, 2000, 16_384
"""Of the recorder that are sent: what all ranks together may send is bounded, and calls that have not ended are always sent."""
ORDERLY_CALLS, MAX_ORDERLY_CALLS = 32, 512
"""Of a rank that ended as it should: always, and of those that nobody was told of."""
CRASH_S = 1.0
"""For everything, while a rank that crashes waits for us."""

Reason = Literal["asked", "last_breath"]
"""`last_breath`: the rank crashes, and waits for us. Journals hold the word."""
Part = TypeVar("Part")
MAX_THREADS = 64
MAX_STACK_FRAMES = 128
MAX_ERROR_CHARS = 300
QUICK_ATTEMPTS = 3
"""A rank that runs while it is read may be caught in the middle of a change."""
REAP_S = 2.0
_NATIVE_ENDINGS = (".c", ".cc", ".cpp", ".h", ".hpp", ".pyx", ".so")


class Examiner:
    """Looks at one rank, when asked and when it dies; keeps the last stacks."""

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
        """Takes native frames; outlives the exam that began it."""
        self._native: _Native | None = None
        """The last native frames."""
        self._last_process: ProcessState | None = None
        """While it lived."""
        self._last_stacks: list[ThreadStack] = []
        self._last_stacks_s = 0.0
        self._paused_s, self._rest_until_s = 0.0, 0.0
        """When the rank was last paused for native frames, and how long it is not to be again."""

    @property
    def is_spying(self) -> bool:
        """Whether we are taking stacks: the process then shows as traced."""
        return self._num_spies > 0

    def use(self, recorder: Recorder, copies: Copies) -> None:
        """The rank has a recorder that can be asked."""
        self._recorder, self._copies = recorder, copies

    def learn(self, groups: Iterable[Group]) -> None:
        """Who belongs to which group, as the rank says."""
        self._groups |= {group.name: group for group in groups}

    async def exam(self, asked_ns: int, depth: ExamDepth, reason: Reason) -> Exam:
        """Examine the rank: every part that can be had; never raises."""
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
        """The process, for the watch; None while we take stacks, which would show it traced."""
        if self.is_spying:
            return None
        seen = self._process.look(now_s)
        if seen.state not in ENDED:
            self._last_process = seen
        return seen

    def of_the_dead(self, asked_ns: int, num_left: int | None) -> Exam:
        """An exam of a dead rank, from what was last seen; nothing is asked.

        Of a rank that ended normally the last few calls are enough, and the `num_left` that nobody was told of.
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
        """What the rank itself left of its recorder."""
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
        """The last copy, however old: it says when it was taken."""
        if self._copies is None:
            return None, "this rank has no recorder that could be asked"
        last = self._copies.last
        if last is None:
            return None, error or self._copies.error or "no copy of the recorder was made yet"
        return trimmed(with_members(last, self._groups), self._rank, min(limit, self._max_calls)), error

    async def _inside(
        self, process: ProcessState | None, depth: ExamDepth, *, is_hurried: bool
    ) -> tuple[bool | None, tuple[list[ThreadStack], str]]:
        """First the interpreter, then the stacks; a rank that dies is not asked."""
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
        """Wait for native frames that are wanted, or under way; why they are wanted and not there."""
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
        """The rank stands where it stood when native frames were taken, by its beat and by the Python frames of its main thread."""
        is_same_place = self._watch.is_standing and native.beat == self._watch.beat
        return is_same_place and _has_native(native.stacks) and _python(native.stacks) == _python(taken)

    def _spared(self, now_s: float) -> str:
        """Why the rank is not to be paused; empty: it may be. One that stands still may always."""
        if self._watch.waited_s(now_s) < MOVING_S:
            return "the rank moves, and is not to be paused"
        if not self._watch.is_standing and now_s < self._rest_until_s:
            return (
                f"it was paused for them {now_s - self._paused_s:.0f} s ago and does not stand still by its own measure"
            )
        return ""

    async def _call_lines(self) -> dict[int, tuple[str, ...]]:
        """Only asked of an interpreter that has just answered: a question that is not answered holds a thread of the rank's."""
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
    """Stacks that were taken through native code, or what could be had instead, and why."""

    stacks: list[ThreadStack]
    error: str
    beat: PageHeartbeat | None
    """Where the rank was then."""
    had_s: float


def _has_native(taken: list[ThreadStack]) -> bool:
    return any(frame.is_native for stack in taken for frame in stack.frames)


def _python(taken: list[ThreadStack]) -> list[tuple[str, str]]:
    """Functions that the main thread is in."""
    main = next((stack for stack in taken if stack.is_main), None)
    return [(frame.function, frame.file) for frame in main.frames if not frame.is_native] if main else []


def bounded(stacks: list[ThreadStack], max_frames: int) -> list[ThreadStack]:
    """The first threads, and of the last of them the innermost frames."""
    kept: list[ThreadStack] = []
    for stack in stacks:
        if max_frames <= 0:
            break
        kept.append(msgspec.structs.replace(stack, frames=stack.frames[:max_frames]))
        max_frames -= len(stack.frames)
    return kept


async def _in_time(part: Awaitable[Part], deadline_s: float, what: str) -> Part | str:
    """The result, or why there is none in time."""
    try:
        async with asyncio.timeout(deadline_s):
            return await part
    except TimeoutError:
        return f"{what} did not answer in {deadline_s:g} s"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the part's own and the others go on
        return f"{what} failed: {type(error).__name__}: {error}"


class _SpiedLocal(msgspec.Struct):
    """As py-spy writes it: only what `_WORK` names is looked at, and nothing of it is kept."""

    name: str
    repr: str | None = None


class _SpiedFrame(msgspec.Struct):
    """As py-spy writes it; `module` is there in native frames only, and names the library."""

    name: str
    filename: str
    line: int = 0
    module: str | None = None
    locals: list[_SpiedLocal] | None = None


class _SpiedThread(msgspec.Struct):
    """As py-spy writes it."""

    pid: int
    os_thread_id: int | None = None
    thread_name: str | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[_SpiedFrame] = []


_DECODER = msgspec.json.Decoder(list[_SpiedThread])
_PIPELINING = "torch/distributed/pipelining/stage"
_WORK = {"fwd_chunk_id": "forward pass", "bwd_chunk_id": "backward pass"}
"""Arguments of a stage's functions -> what it computes."""


class _SpyError(Exception):
    """Why there are no stacks, as one sentence."""


async def take_stacks(pid: int, depth: ExamDepth, deadline_s: float = 5.0) -> tuple[list[ThreadStack], str]:
    """(stacks, error); both where something better was wanted than could be had. Never raises, and leaves no child behind."""
    # Beside the interpreter first: the one that was installed with us.
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.is_file() else shutil.which("py-spy")
    if program is None:
        return [], "py-spy is not installed beside this interpreter nor on the PATH"
    ends_s = clock.monotonic_s() + deadline_s
    failures: list[str] = []
    # Time is left for the quick ones.
    attempts = [(["--native", "--locals"], 0.8 * deadline_s)] if depth == "native" else []
    # With what variables hold first: a pipeline's micro-batch is one.
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
    """From py-spy's JSON; raises msgspec.MsgspecError on anything else. The main thread comes first."""
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
    """What a stage of torch's pipelines computes in this frame."""
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
        # The kernel lets go of a rank whose tracer is killed: it runs on.
        await _end(child)
    if child.returncode != 0:
        raise _SpyError(explain_complaint(complaint.decode("utf-8", "replace")))
    try:
        return parse_stacks(output)
    except UNREADABLE as error:
        raise _SpyError(f"py-spy's answer cannot be read: {error}") from None


async def _end(child: asyncio.subprocess.Process) -> None:
    """Kill it if it lives, and reap it."""
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REAP_S):
            await child.wait()


def explain_complaint(complaint: str) -> str:
    """py-spy's complaint as one line: the error and its causes, without the trace of its own stack."""
    text = complaint.partition("Stack backtrace:")[0]
    lines = [re.sub(r"^(Error:|\d+:)\s*", "", line.strip()) for line in text.splitlines()]
    said = [line for line in dict.fromkeys(lines) if line and line != "Caused by:"]
    return ": ".join(said)[:MAX_ERROR_CHARS] or "py-spy failed without a word"
