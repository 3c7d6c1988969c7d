"""Warnings of the few kinds that say what is wrong with a run, with the module that was running.

Read where Python shows a warning, after the script's own filters have let it pass: they work exactly as without us. What they
silence we do not see: that would need a filter of ours before theirs, which a script can notice.
"""

import re
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from holter.rank.context import Context
from holter.records import ScriptWarning

KINDS = re.compile(
    r"degrees of freedom is <= 0"  # a variance over one sample, or none
    r"|None of the inputs have requires_grad=True"  # reentrant checkpointing cuts the graph
)
MAX_TEXT = 300
MAX_TOLD = 32
MAX_FRAMES = 64


class WarningProbe:
    """Listens to what Python shows."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told: set[tuple[str, str]] = set()

    def install(self) -> None:
        """Replace the function that both `warnings.warn` and torch's native code call."""
        self._context.patches.replace("_showwarnmsg", self._around_show, warnings)

    def _around_show(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        read = self._context.guard.wrap(self._read)

        def show(message: Any) -> None:
            read(message, sys._getframe().f_back)  # noqa: SLF001  the only way to a frame
            original(message)

        return show

    def _read(self, message: Any, frame: FrameType | None) -> None:
        text = str(message.message)
        if KINDS.search(text) is None or len(self._told) >= MAX_TOLD:
            return
        where, module = f"{message.filename}:{message.lineno}", self._module(frame)
        if (where, module) not in self._told:
            self._told.add((where, module))
            self._context.writer.say(
                self._context.log.step, ScriptWarning(text=text[:MAX_TEXT], where=where, module=module)
            )

    def _module(self, frame: FrameType | None) -> str:
        """The innermost module whose forward is running: its name, or its class where no name is known.

        Of other frames nothing is read: that would keep what lies in their variables alive.
        """
        for _ in range(MAX_FRAMES):
            if frame is None:
                return ""
            owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
            if isinstance(owner, torch.nn.Module):
                return self._name(owner)
            frame = frame.f_back
        return ""

    def _name(self, module: torch.nn.Module) -> str:
        for model in self._context.models:
            inner = model.inner
            for name, part in inner.named_modules() if inner is not None else ():
                if part is module:
                    return f"{model.prefix}{name}"
        return type(module).__name__
