"""A rank's last words: an exception that reaches the top, or an ordinary end. A process that is killed has none.

With an exception its newest collectives are left too: where gloo aborts one process over sizes that do not match, the other side of the
mismatch is in the one that raises. And it may be asked to save before it ends: its peers may be gone, and its state good.
"""

import atexit
import sys
import traceback
from types import TracebackType
from typing import Any, Literal

from holter.rank.context import Context
from holter.rank.hooks import last_calls
from holter.rank.interactive import is_interactive
from holter.records import Farewell

MAX_TEXT = 2000

Kind = Literal["end", "exception", "interrupt", "exit"]


class EndingProbe:
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
        # Called by somebody who has caught the exception, or before a prompt: the process goes on.
        if sys.exc_info()[1] is not None or is_interactive():
            self._previous(kind, error, trace)
            return
        guard = self._context.guard
        guard.wrap(self._exception)(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            guard.wrap(last_calls.leave)(self._context)
        self._previous(kind, error, trace)
        if self._context.hold.agent is not None and not issubclass(kind, KeyboardInterrupt):
            # It is shown by now, whatever comes. A peer may have died: this rank's state may be all that is left.
            guard.wrap(self._context.hold.agent.linger)(f"{kind.__name__}: {error}"[:MAX_TEXT])

    def _exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frames = traceback.extract_tb(trace)
        where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        is_interrupt = issubclass(kind, KeyboardInterrupt)
        self.say("interrupt" if is_interrupt else "exception", f"{kind.__name__}: {error}"[:MAX_TEXT], where)

    def _end(self) -> None:
        self.say("end", "", "")

    def say(self, kind: Kind, text: str, where: str) -> None:
        """The first words are the last."""
        if not self._is_said:
            self._is_said = True
            self._context.writer.say(self._context.log.step, Farewell(kind=kind, text=text, where=where))
