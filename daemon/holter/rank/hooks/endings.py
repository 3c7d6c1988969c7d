"""How a rank ends, told while it still can: an exception that reaches the top, an ordinary end, `sys.exit` or `os._exit`. A process that is killed tells nothing.

With an exception, and with `os._exit`, its newest collectives are left on the page too: where gloo aborts one process over sizes that do not
match, the other side of the mismatch is in the one that raises. At an ordinary end all that the recorder holds is: what was called since its
last copy would be compared with nobody's. And a rank with an exception may be asked to save before it ends: its peers
may be gone, and its state good.

`sys.exit` reaches no excepthook: it is remembered where it was called, and told if the interpreter then ends. Called while an exception is
being handled, it and `os._exit` end the rank over that exception: `multiprocessing` and many scripts do so.

`os._exit` leaves past excepthook, atexit and every destructor. The page outlives the process, so what is written there is kept; then the
original is called with the same code. A forked child that ends so, as every worker of `multiprocessing` does, is not the rank and
tells nothing.

Some launchers (Ray Train) end their workers from native code, once the script's function is done: exit code 1, and Python is not asked. A rank that has
left its process group says so, for the case that this is its last word.
"""

import atexit
import builtins
import functools
import os
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Literal

import msgspec
import torch.distributed as dist

from holter.rank.context import Context
from holter.rank.flight_server import call_lines, dump
from holter.rank.own_code import frames_of, own_frames, place_of, text_of
from holter.records import LEFT, Farewell, LastCalls
from holter.redaction import cleaned

MAX_CALLS = 64
MAX_TEXT = 2000
MAX_DUMP_BYTES = 1 << 20
"""Of a recorder that is left as a whole: the page's ring holds some megabytes."""

Kind = Literal["end", "exception", "interrupt", "exit"]


class EndingProbe:
    """Stands before excepthook and among the atexit functions, and passes everything on."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._previous: Any = None
        self._exit: Farewell | None = None
        """The last call of `sys.exit`."""
        self._is_said = False

    def install(self) -> None:
        """Stand before the present excepthook, which is called as before."""
        self._previous = sys.excepthook
        sys.excepthook = self._excepthook
        atexit.register(self._context.guard.wrap(self._end))

    def uninstall(self) -> None:
        """Step aside, unless somebody stands before us by now."""
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Called by somebody who has caught the exception, or before a prompt: the process goes on.
        if sys.exc_info()[1] is not None or is_interactive():
            self._previous(kind, error, trace)
            return
        guard = self._context.guard
        guard.wrap(self._exception)(error)
        if not issubclass(kind, KeyboardInterrupt):
            guard.wrap(leave_last_calls)(self._context)
        self._previous(kind, error, trace)
        if self._context.hold.agent is not None and not issubclass(kind, KeyboardInterrupt):
            # The traceback is printed by now, whatever comes. A peer may have died: this rank's state may be all that is left.
            guard.wrap(self._context.hold.agent.linger)(f"{kind.__name__}: {error}"[:MAX_TEXT])

    def _exception(self, error: BaseException) -> None:
        self._say(_of_exception(error, "interrupt" if isinstance(error, KeyboardInterrupt) else "exception"))

    def _end(self) -> None:
        self._say(self._exit or Farewell(kind="end", text="", where=""))
        self._context.guard.attempt(leave_recorder, self._context)

    def remember(self, called: Farewell) -> None:
        """`sys.exit` was called; whoever catches it may go on."""
        self._exit = called

    def leave_group(self) -> None:
        """The process group was destroyed; the script goes on, and may say more."""
        if not self._is_said:
            self._context.writer.say(self._context.log.step, Farewell(kind="end", text=LEFT, where=""))

    def leave(self, farewell: Farewell) -> None:
        """`os._exit` is called now."""
        self._say(farewell)

    def _say(self, farewell: Farewell) -> None:
        """Tell why the rank ends; only the first reason counts."""
        if not self._is_said:
            self._is_said = True
            self._context.writer.say(self._context.log.step, farewell)


class ExitProbe:
    """Stands before `os._exit` and `sys.exit`, and behind `destroy_process_group`."""

    def __init__(self, context: Context, ending: EndingProbe) -> None:
        self._context = context
        self._ending = ending
        self._pid = os.getpid()

    def install(self) -> None:
        """From now on they say where they were called."""
        self._context.patches.replace("_exit", self._around_os_exit, os)
        self._context.patches.replace("exit", self._around_sys_exit, sys)
        modules = (dist, dist.distributed_c10d)
        self._context.patches.replace("destroy_process_group", self._around_leaving, *modules)

    def _around_os_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        guard = self._context.guard
        leave_calls, tell = guard.wrap(leave_last_calls, "any"), guard.wrap(self._leave, "any")

        @functools.wraps(original)
        def _exit(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() == self._pid:
                tell(sys._getframe().f_back, args[0] if args else kwargs.get("status"))  # noqa: SLF001
                leave_calls(self._context)
            return original(*args, **kwargs)

        return _exit

    def _around_sys_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tell = self._context.guard.wrap(self._remember)

        @functools.wraps(original)
        def exit_(*args: Any) -> Any:
            if os.getpid() == self._pid:
                tell(sys._getframe().f_back, args[0] if args else None)  # noqa: SLF001
            return original(*args)

        return exit_

    def _around_leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tell = self._context.guard.wrap(self._ending.leave_group, "any")

        @functools.wraps(original)
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if not dist.is_initialized():
                tell()
            return found

        return destroy_process_group

    def _leave(self, frame: FrameType | None, status: object) -> None:
        self._ending.leave(_handled(status) or _called("exit", f"os._exit({status})", frame))

    def _remember(self, frame: FrameType | None, status: object) -> None:
        self._ending.remember(_handled(status) or _called("end", f"sys.exit({status!r})"[:MAX_TEXT], frame))


def _handled(status: object) -> Farewell | None:
    """The exception over which the process is ended, if there is one and the end is no success."""
    error = sys.exc_info()[1]
    if status in (None, 0) or error is None or isinstance(error, SystemExit | KeyboardInterrupt):
        return None
    return _of_exception(error, "exception")


def _of_exception(error: BaseException, kind: Kind) -> Farewell:
    frames, text = frames_of(error), cleaned(text_of(error))
    return Farewell(kind=kind, text=text, where=place_of(frames[-1]) if frames else "", own=own_frames(error))


def _called(kind: Kind, text: str, frame: FrameType | None) -> Farewell:
    """At exit and in a bare thread the interpreter itself calls, from no line."""
    text = cleaned(text)
    if frame is None:
        return Farewell(kind=kind, text=text, where="")
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return Farewell(kind=kind, text=text, where=place, own=own_frames(frame))


def leave_last_calls(context: Context) -> None:
    """Copy the newest collectives, if there are any, from the Flight Recorder to the page; some milliseconds.

    The rank may be ended any moment, by its launcher above all, so nothing is done here that the sidecar can do as well.
    """
    found = msgspec.json.decode(dump() or b"{}")
    calls = found.get("entries")
    if calls:
        lines = context.guard.attempt(call_lines) or {}
        found["entries"] = [entry | {"lines": lines.get(entry.get("record_id"), ())} for entry in calls[-MAX_CALLS:]]
        context.writer.say(context.log.step, LastCalls(dump=msgspec.json.encode(found)))


def leave_recorder(context: Context) -> None:
    """The whole recorder, for a rank that ends as it should; without lines, which only somebody who asks in time gets."""
    found = dump()
    if found and len(found) <= MAX_DUMP_BYTES and msgspec.json.decode(found).get("entries"):
        context.writer.say(context.log.step, LastCalls(dump=found, is_orderly=True))


def is_interactive() -> bool:
    """Whether a person sits before this interpreter: then an exception, or a SystemExit, is not the end of the process.

    A prompt is there or will be (`python -i`), or a notebook's cell runs.
    """
    return hasattr(sys, "ps1") or bool(sys.flags.inspect) or hasattr(builtins, "get_ipython")
