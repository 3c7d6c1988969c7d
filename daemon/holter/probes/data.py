"""The data phase: time spent in a DataLoader's `next`."""

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from holter.probes.context import Context
from holter.records import Phase


class DataProbe:
    """Follows every DataLoader of the process."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def install(self) -> None:
        """Call through ours whenever a batch is fetched."""
        self._context.patches.replace(_BaseDataLoaderIter, "__next__", self._around_next)

    def _around_next(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return in_phase(self._context, Phase.DATA, original)


def in_phase(context: Context, phase: Phase, original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with the phase shown while it runs."""
    interrupted: list[Phase] = []
    begin = context.guard.wrap(lambda: interrupted.append(context.enter(phase)))
    end = context.guard.wrap(lambda: context.enter(interrupted.pop()))

    @functools.wraps(original)
    def within(*args: Any, **kwargs: Any) -> Any:
        begin()
        try:
            return original(*args, **kwargs)
        finally:
            end()

    return within
