"""ZeRO's step around the steps of the optimizer inside it.

    engine.step()
        zero.step()                       <- the step begins: nothing is applied, and all gradients are there, reduced and partitioned
            optimizer.step()  group 0     <- too late to hold, and one of several
            optimizer.step()  group 1 …

So ZeRO's step is the optimizer's step here, and what it steps inside is its own matter. Before it, its gradients are not yet where the
inner optimizer will find them: they are lent to those who read what is applied. In fp16 ZeRO looks for overflows itself and skips such
steps, which is no fault; DeepSpeed counts a skipped step, and so do we.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holter.rank.context import Context
from holter.rank.framework import LateImports, LibraryFunction
from holter.rank.hooks.step import StepProbe

STEPS = (
    LibraryFunction("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "step"),
    LibraryFunction("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "step"),
)
"""Of DeepSpeed's optimizers that partition what they apply."""


class ZeroProbe:
    """Follows ZeRO's optimizers, once the script has imported DeepSpeed."""

    def __init__(self, context: Context, steps: StepProbe) -> None:
        self._context = context
        self._steps = steps
        self._awaited = LateImports(STEPS)
        self._open: list[torch.optim.Optimizer] = []

    def look(self) -> None:
        """Follow what has come since the last look."""
        for found, owners in self._awaited.come():
            self._context.patches.replace(found.name, self._around, *owners)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        wrap = self._context.guard.wrap
        begin, end = wrap(self._begin, "claims"), wrap(self._end)

        @functools.wraps(original)
        def step(zero: Any, *args: Any, **kwargs: Any) -> Any:
            begin(zero)
            try:
                return original(zero, *args, **kwargs)
            finally:
                end(zero)

        return step

    def _begin(self, zero: Any) -> None:
        inner = zero.optimizer
        names = {id(p): name for model in self._context.models for name, p in model.parameters}
        found = list(_gradients(zero, names))
        ours = {id(parameter) for (_, parameter), _ in found}
        for model in self._context.models:
            model.is_active |= any(id(p) in ours for _, p in model.parameters)
        skips = _skips_overflows(zero)
        self._context.frameworks.lent[inner] = [] if skips else found
        (self._context.frameworks.partitioned.discard if skips else self._context.frameworks.partitioned.add)(inner)
        self._open.append(inner)
        self._steps.begin(inner)

    def _end(self, zero: Any) -> None:
        if not self._open:
            return
        inner, context = self._open.pop(), self._context
        context.frameworks.lent.pop(inner, None)
        if getattr(zero, "overflow", False):
            # ZeRO has thrown the gradients away.
            context.log.now.acquit(is_skipped=True)
            context.inputs.suspect = None
        self._steps.end(inner)


def _skips_overflows(zero: Any) -> bool:
    return getattr(zero, "dtype", None) is torch.float16 or bool(getattr(zero, "torch_autocast_gradscaler", None))


def _gradients(zero: Any, names: dict[int, str]) -> Iterator[tuple[tuple[str, Any], torch.Tensor]]:
    """This rank's part of every reduced gradient, by the names of the parameters."""
    flats: Any = getattr(zero, "fp32_partitioned_groups_flat", ()) or getattr(
        zero, "single_partition_of_fp32_groups", ()
    )
    groups: Any = getattr(zero, "params_in_partition", ()) or getattr(zero, "fp16_groups", ())
    averaged = getattr(zero, "averaged_gradients", {})
    for number, flat in enumerate(flats):
        parts = averaged.get(number)
        if parts is None:
            # Offloaded: it lies where the inner optimizer will find it.
            if flat.grad is not None:
                yield (f"partition {number}", flat), flat.grad
            continue
        owners = iter(groups[number] if number < len(groups) else ())
        for part in parts:
            owner = None if getattr(part, "_zero_padding", False) else next(owners, None)
            if part is not None:
                yield (names.get(id(owner), f"partition {number}"), part if owner is None else owner), part
