"""How a rank ends, told while it still can: an exception that reaches the top, an ordinary end, or `os._exit`. A process that is killed tells nothing.

With an exception, and with `os._exit`, its newest collectives are left on the page too: where gloo aborts one process over sizes that do not
match, the other side of the mismatch is in the one that raises. And a rank with an exception may be asked to save before it ends: its peers
may be gone, and its state good.

`os._exit` leaves past excepthook, atexit and every destructor. The page outlives the process, so what is written there is kept; then the
original is called with the same code. A forked child that ends so, as every worker of `multiprocessing` does, is not the rank and
tells nothing.
"""

import atexit
import builtins
import functools
import os
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Literal

import msgspec

from holter.rank.context import Context
from holter.rank.flight_server import dump
from holter.records import Farewell, LastCalls

MAX_CALLS = 64
MAX_TEXT = 2000

Kind = Literal["end", "exception", "interrupt", "exit"]


class EndingProbe:
    """Stands before excepthook and among the atexit functions, and passes everything on."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._previous: Any = None
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
        guard.wrap(self._exception)(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            guard.wrap(leave_last_calls)(self._context)
        self._previous(kind, error, trace)
        if self._context.hold.agent is not None and not issubclass(kind, KeyboardInterrupt):
            # The traceback is printed by now, whatever comes. A peer may have died: this rank's state may be all that is left.
            guard.wrap(self._context.hold.agent.linger)(f"{kind.__name__}: {error}"[:MAX_TEXT])

    def _exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frames = traceback.extract_tb(trace)
        where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        is_interrupt = issubclass(kind, KeyboardInterrupt)
        self.say("interrupt" if is_interrupt else "exception", f"{kind.__name__}: {error}"[:MAX_TEXT], where)

    def _end(self) -> None:
        self.say("end", "", "")

    def say(self, kind: Kind, text: str, where: str) -> None:
        """Tell why the rank ends; only the first reason counts."""
        if not self._is_said:
            self._is_said = True
            self._context.writer.say(self._context.log.step, Farewell(kind=kind, text=text, where=where))


class ExitProbe:
    """Stands before `os._exit`."""

    def __init__(self, context: Context, ending: EndingProbe) -> None:
        self._context = context
        self._ending = ending
        self._pid = os.getpid()

    def install(self) -> None:
        """From now on `os._exit` says where it was called."""
        self._context.patches.replace("_exit", self._around, os)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        guard = self._context.guard
        leave_calls, tell = guard.wrap(leave_last_calls, "any"), guard.wrap(self._tell, "any")

        @functools.wraps(original)
        def _exit(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() == self._pid:
                tell(sys._getframe().f_back, args[0] if args else kwargs.get("status"))  # noqa: SLF001
                leave_calls(self._context)
            return original(*args, **kwargs)

        return _exit

    def _tell(self, frame: FrameType | None, status: object) -> None:
        # At exit and in a bare thread the interpreter itself calls, from no line.
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame is not None else ""
        self._ending.say("exit", f"os._exit({status})", where)


def leave_last_calls(context: Context) -> None:
    """Copy the newest collectives, if there are any, from the Flight Recorder to the page; some milliseconds.

    The rank may be ended any moment, by its launcher above all, so nothing is done here that the sidecar can do as well.
    """
    found = msgspec.json.decode(dump() or b"{}")
    calls = found.get("entries")
    if calls:
        found["entries"] = calls[-MAX_CALLS:]
        context.writer.say(context.log.step, LastCalls(dump=msgspec.json.encode(found)))


def is_interactive() -> bool:
    """Whether a person sits before this interpreter: then an exception, or a SystemExit, is not the end of the process.

    A prompt is there or will be (`python -i`), or a notebook's cell runs.
    """
    return hasattr(sys, "ps1") or bool(sys.flags.inspect) or hasattr(builtins, "get_ipython")
