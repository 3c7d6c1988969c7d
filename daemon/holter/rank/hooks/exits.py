"""`os._exit`: leaves past excepthook, atexit and every destructor. Here it is said who left, from which line, in which collectives.

The page outlives the process, so a word written there is kept; then the original is called with the same code. A forked child that ends
so, as every worker of `multiprocessing` does, is not the rank and says nothing.
"""

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from holter.rank.context import Context
from holter.rank.hooks import last_calls
from holter.rank.hooks.ending import EndingProbe


class ExitProbe:
    """Stands before `os._exit`."""

    def __init__(self, context: Context, farewell: EndingProbe) -> None:
        self._context = context
        self._farewell = farewell
        self._pid = os.getpid()

    def install(self) -> None:
        """From now on `os._exit` says where it was called."""
        self._context.patches.replace("_exit", self._around, os)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        guard = self._context.guard
        leave_calls, leave_word = guard.wrap(last_calls.leave, "any"), guard.wrap(self._leave_word, "any")

        @functools.wraps(original)
        def _exit(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() == self._pid:
                leave_word(sys._getframe().f_back, args[0] if args else kwargs.get("status"))  # noqa: SLF001
                leave_calls(self._context)
            return original(*args, **kwargs)

        return _exit

    def _leave_word(self, frame: FrameType | None, status: object) -> None:
        # At exit and in a bare thread the interpreter itself calls, from no line.
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame is not None else ""
        self._farewell.say("exit", f"os._exit({status})", where)
