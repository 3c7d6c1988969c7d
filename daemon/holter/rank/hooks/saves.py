"""Shows saves and evaluations of libraries as such from beginning to end: a rank that writes a checkpoint for minutes does not hang.

`torch.save` and a model's calls are followed in `model_calls.py`. What a library does around them (weights as safetensors, shards, metrics,
uploads) lies in functions of its own. Nothing is imported for this: a library is followed once the script has imported it.

If the outermost save ends without an exception, and a run can go on from what it wrote, it is reported as a finished checkpoint, with its path.
"""

import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holter import clock
from holter.rank.context import Context, in_phase
from holter.rank.framework import LateImports, SaveFunction, absolute
from holter.records import Phase, SaveFinished

MAX_DEPTH = 4
"""Number of levels down to which the object that `torch.save` is given is searched for tensors."""


class SaveProbe:
    """Follows the libraries that the script has imported."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._awaited = LateImports([each for framework in context.frameworks.known for each in framework.saves])
        self._around_us = threading.local()
        """Its `depth` is the number of saves that this thread is inside of."""
        self._say = context.guard.wrap(self._tell)

    def install(self) -> None:
        """Follow the libraries that are already imported, and `torch.save`."""
        self._context.guard.wrap(self.look, "any")()
        # This wraps around the patch of `model_calls.py`: only here it is known whether a library's save is around it.
        self._context.patches.replace("save", self._around_torch_save, torch, torch.serialization)

    def look(self) -> None:
        """Follow the libraries that were imported since the last call."""
        for function, owners in self._awaited.come():
            make = functools.partial(self._around, function)
            self._context.patches.replace(function.name, make, *owners)

    def _around(self, function: SaveFunction, original: Callable[..., Any]) -> Callable[..., Any]:
        shown = in_phase(self._context, function.phase, original)
        return (
            self._reporting(shown, function.checkpoint, function.where) if function.phase is Phase.CHECKPOINT else shown
        )

    def _around_torch_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def where(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> str:
            return _path_of_torch_save(args, kwargs, sum(_size(model.inner) for model in self._context.models))

        return self._reporting(original, "torch", where)

    def _reporting(
        self, call: Callable[..., Any], framework: str, where: Callable[..., str] | None
    ) -> Callable[..., Any]:
        """Wrap a function so that its outermost call, if it ends without an exception, is reported."""

        @functools.wraps(getattr(call, "__wrapped__", call))
        def within(*args: Any, **kwargs: Any) -> Any:
            began_s, depth = clock.monotonic_s(), getattr(self._around_us, "depth", 0)
            self._around_us.depth = depth + 1
            try:
                result = call(*args, **kwargs)
            finally:
                self._around_us.depth = depth
            if where is not None and depth == 0:
                self._say(framework, functools.partial(where, args, kwargs, result), began_s)
            return result

        return within

    def _tell(self, framework: str, where: Callable[[], str], began_s: float) -> None:
        path = where()
        if path:
            seconds = round(clock.monotonic_s() - began_s, 3)
            self._context.writer.say(
                self._context.log.step, SaveFinished(path=path, framework=framework, seconds=seconds)
            )


def _size(module: torch.nn.Module | None) -> int:
    return sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0


def _path_of_torch_save(args: tuple[Any, ...], kwargs: Mapping[str, Any], num_parameters: int) -> str:
    """Return where `torch.save(obj, f)` wrote; "" if it saved less than half as many numbers as the models have, which is no checkpoint."""
    saved = args[0] if args else kwargs.get("obj")
    target = args[1] if len(args) > 1 else kwargs.get("f")
    if _num_numbers(saved) * 2 < max(1, num_parameters):
        return ""
    return absolute(target if isinstance(target, (str, os.PathLike)) else getattr(target, "name", ""))


def _num_numbers(thing: Any, depth: int = 0) -> int:
    """Count the floating-point elements in a tensor, a module, a state dict, or nested containers of these."""
    if isinstance(thing, torch.Tensor):
        return thing.numel() if thing.is_floating_point() else 0
    if isinstance(thing, torch.nn.Module):
        return sum(parameter.numel() for parameter in thing.parameters())
    if depth >= MAX_DEPTH:
        return 0
    parts = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, (list, tuple)) else ()
    return sum(_num_numbers(part, depth + 1) for part in parts)
