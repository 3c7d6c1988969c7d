"""Stacks of a rank from outside, by py-spy: a program that reads another process's memory, and so works on one that hangs.

    quick     without pausing the rank: some ten milliseconds; the only way with a stopped process
    native    through native code too: takes about a second of one core for a rank with torch, which is paused for most of it; so on
              suspicion only

What native cannot have (no permission, a stopped process, a library without unwinding tables) quick often can: then the stacks are the
quick ones, and the error says why. Never raises; no child is left behind, whatever happens.
"""

import asyncio
import contextlib
import re
import shutil
import sys
from pathlib import Path

import msgspec

from holter import clock
from holter.records import ExamDepth, Frame, ThreadStack

MAX_THREADS = 64
MAX_FRAMES = 128
MAX_ERROR_CHARS = 300
QUICK_ATTEMPTS = 3
"""A rank that runs while it is read may be caught in the middle of a change."""
REAP_S = 2.0
_NATIVE_ENDINGS = (".c", ".cc", ".cpp", ".h", ".hpp", ".pyx", ".so")


class _SpiedFrame(msgspec.Struct):
    """As py-spy writes it; `module` is there in native frames only, and names the library."""

    name: str
    filename: str
    line: int = 0
    module: str | None = None


class _SpiedThread(msgspec.Struct):
    """As py-spy writes it."""

    pid: int
    os_thread_id: int | None = None
    thread_name: str | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[_SpiedFrame] = []


_DECODER = msgspec.json.Decoder(list[_SpiedThread])


class _SpyError(Exception):
    """Why there are no stacks, as one sentence."""


async def take(pid: int, depth: ExamDepth, deadline_s: float = 5.0) -> tuple[list[ThreadStack], str]:
    """(stacks, error); both where something better was wanted than could be had."""
    program = find_program()
    if program is None:
        return [], "py-spy is not installed beside this interpreter nor on the PATH"
    ends_s = clock.monotonic_s() + deadline_s
    failures: list[str] = []
    # Time is left for the quick ones.
    attempts = [(["--native"], 0.8 * deadline_s)] if depth == "native" else []
    attempts += [(["--nonblocking"], deadline_s)] * QUICK_ATTEMPTS + [([], deadline_s)]
    for options, most_s in attempts:
        remaining_s = min(most_s, ends_s - clock.monotonic_s())
        if remaining_s <= 0:
            break
        try:
            stacks = await _dump(program, pid, options, remaining_s)
        except _SpyError as error:
            failures.append(f"no native frames: {error}" if options == ["--native"] else f"no stacks: {error}")
        else:
            return stacks, failures[0] if depth == "native" and failures else ""
    return [], "; ".join(dict.fromkeys([failures[0], failures[-1]]))


def find_program() -> str | None:
    """Beside the interpreter first: the one that was installed with us."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def parse(output: bytes) -> list[ThreadStack]:
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
            for frame in thread.frames[:MAX_FRAMES]
        ],
    )


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
        raise _SpyError(explain(complaint.decode("utf-8", "replace")))
    try:
        return parse(output)
    except msgspec.MsgspecError as error:
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


def explain(complaint: str) -> str:
    """py-spy's complaint as one line: the error and its causes, without the trace of its own stack."""
    text = complaint.partition("Stack backtrace:")[0]
    lines = [re.sub(r"^(Error:|\d+:)\s*", "", line.strip()) for line in text.splitlines()]
    said = [line for line in dict.fromkeys(lines) if line and line != "Caused by:"]
    return ": ".join(said)[:MAX_ERROR_CHARS] or "py-spy failed without a word"
