"""A rank's last words: an exception that reaches the top, or an ordinary end. A process that is killed has none."""

import atexit
import sys
import traceback
from types import TracebackType
from typing import Any

from holter.probes.context import Context
from holter.records import Farewell

MAX_TEXT = 2000


class FarewellProbe:
    """Listens at the interpreter's last exits and passes everything on."""

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
        self._context.guard.wrap(self._exception)(kind, error, trace)
        self._previous(kind, error, trace)

    def _exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frames = traceback.extract_tb(trace)
        where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        is_interrupt = issubclass(kind, KeyboardInterrupt)
        self._say("interrupt" if is_interrupt else "exception", f"{kind.__name__}: {error}"[:MAX_TEXT], where)

    def _end(self) -> None:
        self._say("end", "", "")

    def _say(self, kind: Any, text: str, where: str) -> None:
        if not self._is_said:
            self._is_said = True
            self._context.recorder.say(self._context.log.step, Farewell(kind=kind, text=text, where=where))
