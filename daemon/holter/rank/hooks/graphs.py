"""Follows an accelerator's graphs (`torch.cuda.CUDAGraph` and the like): a replay calls no hook, so that a healthy job would look stalled.

    capture    hooks run once, and nothing is computed      nothing is read: a reading would become a part of the script's graph
    replay     no hook runs                                 a heartbeat is sent; optimizer steps that the graph contains are counted

The steps that a graph contains are those whose hooks ran while it was captured.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from holter.rank import accelerator
from holter.rank.context import Context


class GraphProbe:
    """Follows every graph class that this build of torch has."""

    def __init__(self, context: Context, on_steps: Callable[[int], None]) -> None:
        self._context = context
        self._on_steps = on_steps
        self._num_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Graph -> number of optimizer steps that it contains."""
        self._step_at_begin = 0

    def install(self) -> None:
        """Patch the graph classes so that we notice when a capture begins or ends, and each replay."""
        replace = self._context.patches.replace
        for graph in accelerator.graph_classes():
            replace("capture_begin", self._after(self._begin), graph)
            replace("capture_end", self._after(self._end), graph)
            replace("replay", self._after(self._replayed), graph)

    def _after(self, hook: Callable[[Any], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        learn = self._context.guard.wrap(hook)

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(graph: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(graph, *args, **kwargs)
                learn(graph)
                return result

            return call

        return around

    def _begin(self, _: Any) -> None:
        self._step_at_begin = self._context.log.step

    def _end(self, graph: Any) -> None:
        self._num_steps[graph] = self._context.log.step - self._step_at_begin

    def _replayed(self, graph: Any) -> None:
        num_steps = self._num_steps.get(graph, 0)
        if num_steps:
            self._on_steps(num_steps)
        context = self._context
        context.writer.beat(context.log.step, context.phases.phase, context.log.micro_step)
