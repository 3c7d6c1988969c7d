"""Reports how a rank ends, while it still can: by an uncaught exception, an ordinary end, `sys.exit` or `os._exit`. A killed process reports nothing.

After an exception, and at `os._exit`, the rank also leaves its newest collectives on the page: where gloo aborts one process because sizes do
not match, the other side of the mismatch is in the one that raises. At an ordinary end it leaves all that the recorder holds: otherwise other
ranks' calls since its last copy would have nothing to be compared with. And a rank with an exception may be asked to save before it ends: its
peers may be gone, and its state good.

`sys.exit` reaches no excepthook: the call is remembered, and reported if the interpreter then ends. If it or `os._exit` is called while an
exception is being handled, that exception counts as the reason: `multiprocessing` and many scripts end this way.

`os._exit` runs no excepthook, no atexit function and no destructor. The page outlives the process, so what is written there is kept; then the
original is called with the same code. A forked child that ends this way, as every worker of `multiprocessing` does, is not the rank and
reports nothing.

Some launchers (Ray Train) end their workers from native code once the script's function is done, with exit code 1 and without asking Python.
So a rank that has left its process group says so, in case this is its last word.
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
"""Largest dump of the whole recorder that is left on the page, whose ring holds some megabytes."""

Kind = Literal["end", "exception", "interrupt", "exit"]


class EndingProbe:
    """Runs before the excepthook and as an atexit function, and passes everything on."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._previous: Any = None
        self._exit: Farewell | None = None
        """The last call of `sys.exit`; None if there was none."""
        self._is_said = False

    def install(self) -> None:
        """Put our excepthook before the present one, which is still called."""
        self._previous = sys.excepthook
        sys.excepthook = self._excepthook
        atexit.register(self._context.guard.wrap(self._end))

    def uninstall(self) -> None:
        """Restore the previous excepthook, unless somebody has put another one before ours."""
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Somebody who has caught the exception calls this, or there is a prompt: the process goes on.
        if sys.exc_info()[1] is not None or is_interactive():
            self._previous(kind, error, trace)
            return
        guard = self._context.guard
        guard.wrap(self._exception)(error)
        if not issubclass(kind, KeyboardInterrupt):
            guard.wrap(leave_last_calls)(self._context)
        self._previous(kind, error, trace)
        if self._context.hold.agent is not None and not issubclass(kind, KeyboardInterrupt):
            # By now the traceback is printed, whatever happens next. A peer may have died: this rank's state may be all that is left.
            guard.wrap(self._context.hold.agent.linger)(f"{kind.__name__}: {error}"[:MAX_TEXT])

    def _exception(self, error: BaseException) -> None:
        self._say(_of_exception(error, "interrupt" if isinstance(error, KeyboardInterrupt) else "exception"))

    def _end(self) -> None:
        self._say(self._exit or Farewell(kind="end", text="", where=""))
        self._context.guard.attempt(leave_recorder, self._context)

    def remember(self, called: Farewell) -> None:
        """Remember a call of `sys.exit`; it is not reported yet, because the script may catch it and go on."""
        self._exit = called

    def leave_group(self) -> None:
        """Report that the process group was destroyed; the script goes on, and may still end in another way."""
        if not self._is_said:
            self._context.writer.say(self._context.log.step, Farewell(kind="end", text=LEFT, where=""))

    def leave(self, farewell: Farewell) -> None:
        """Report that `os._exit` is being called."""
        self._say(farewell)

    def _say(self, farewell: Farewell) -> None:
        """Report why the rank ends; only the first reason counts."""
        if not self._is_said:
            self._is_said = True
            self._context.writer.say(self._context.log.step, farewell)


class ExitProbe:
    """Runs before `os._exit` and `sys.exit`, and after `destroy_process_group`."""

    def __init__(self, context: Context, ending: EndingProbe) -> None:
        self._context = context
        self._ending = ending
        self._pid = os.getpid()

    def install(self) -> None:
        """Patch these functions so that we learn from where they are called."""
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
    """Return the exception that is being handled and so ends the process; None if there is none or the exit status means success."""
    error = sys.exc_info()[1]
    if status in (None, 0) or error is None or isinstance(error, SystemExit | KeyboardInterrupt):
        return None
    return _of_exception(error, "exception")


def _of_exception(error: BaseException, kind: Kind) -> Farewell:
    frames, text = frames_of(error), cleaned(text_of(error))
    return Farewell(kind=kind, text=text, where=place_of(frames[-1]) if frames else "", own=own_frames(error))


def _called(kind: Kind, text: str, frame: FrameType | None) -> Farewell:
    """Describe a call; `frame` is None at exit and in a bare thread, where the interpreter itself calls, from no line."""
    text = cleaned(text)
    if frame is None:
        return Farewell(kind=kind, text=text, where="")
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return Farewell(kind=kind, text=text, where=place, own=own_frames(frame))


def leave_last_calls(context: Context) -> None:
    """Copy the newest collectives, if there are any, from the Flight Recorder to the page, within some milliseconds.

    The rank may be killed at any moment, most likely by its launcher, so nothing is done here that the sidecar can do as well.
    """
    found = msgspec.json.decode(dump() or b"{}")
    calls = found.get("entries")
    if calls:
        lines = context.guard.attempt(call_lines) or {}
        found["entries"] = [entry | {"lines": lines.get(entry.get("record_id"), ())} for entry in calls[-MAX_CALLS:]]
        context.writer.say(context.log.step, LastCalls(dump=msgspec.json.encode(found)))


def leave_recorder(context: Context) -> None:
    """Leave the whole recorder on the page, for a rank that ends as it should; without the source lines of the calls."""
    found = dump()
    if found and len(found) <= MAX_DUMP_BYTES and msgspec.json.decode(found).get("entries"):
        context.writer.say(context.log.step, LastCalls(dump=found, is_orderly=True))


def is_interactive() -> bool:
    """Whether a person uses this interpreter, so that an exception, or a SystemExit, does not end the process.

    That is so if there is a prompt, or will be one (`python -i`), or if a notebook's cell runs.
    """
    return hasattr(sys, "ps1") or bool(sys.flags.inspect) or hasattr(builtins, "get_ipython")
