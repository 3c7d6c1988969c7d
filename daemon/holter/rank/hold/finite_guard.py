"""The guard: is everything that an optimizer is about to apply finite? Asked on every rank at every step, before it is applied.

What a rank read of its own gradients says nothing about what its peers added in the reduction, and of a large model they are read in
turns. So the gradients that this optimizer applies are read once more, all of them, unless somebody has shown them to be
finite (`shown`), or a loss scaler calls the optimizer: it calls it only then, or lets a fused one skip the step by itself.

Host memory is read at once, at the speed of memory. On a device the pass is started and never waited for: the step is held if the
answer is there by the time the hook is left, which it is where the loop itself has synchronised; else the step is applied and the
answer comes at a later step. The weights are poisoned by then, and the last snapshot is the state to keep.

A rank that applies a shard sees its own alone; what the others found it learns from them (`shards`).

An optimizer that is given a closure computes its gradients inside its step: it cannot be held before.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from holter.rank.context import Context
from holter.rank.readings.samples import local
from holter_kernels import Pass


class FiniteGuard:
    """Reads what is applied; one for a rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._passes: weakref.WeakKeyDictionary[torch.optim.Optimizer, Pass] = weakref.WeakKeyDictionary()
        self._owed: list[tuple[int, Pass]] = []
        """Passes that a device has not answered, with their steps."""
        self._num_scaling = 0
        self.before_scaled: Callable[[], None] = lambda: None
        """Called before a loss scaler decides whether to call an optimizer."""

    def install(self) -> None:
        """Know when a loss scaler calls the optimizer."""
        self._context.patches.replace("step", self._around_step, torch.amp.GradScaler)

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            is_scaling = scaler._enabled  # noqa: SLF001
            if is_scaling:
                self.before_scaled()
            self._num_scaling += is_scaling
            try:
                return original(scaler, *args, **kwargs)
            finally:
                self._num_scaling -= is_scaling

        return step

    def is_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a loss scaler answers for this step."""
        return self._num_scaling > 0 or getattr(optimizer, "found_inf", None) is not None

    def finds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether something that is not finite is about to be applied, as far as can be said without waiting."""
        if self.is_scaled(optimizer):
            return False
        gradients = self._unshown(optimizer)
        if not gradients:
            return False
        reading = self._passes.get(optimizer)
        is_free = reading is not None and not any(reading is owed for _, owed in self._owed)
        if reading is None or not is_free or not reading.launch_on(gradients):
            reading = self._passes[optimizer] = Pass(gradients, histogram="off")
            reading.launch()
        table = reading.poll()
        if table is None:
            self._owed.append((self._context.log.step, reading))
            return False
        return _is_bad(table)

    def late(self) -> int | None:
        """The first step of which a device has answered since that it was not finite; it is in the weights."""
        if not self._owed:
            return None
        answers = [(step, reading, reading.poll()) for step, reading in self._owed]
        self._owed = [(step, reading) for step, reading, table in answers if table is None]
        return next((step for step, _, table in answers if table is not None and _is_bad(table)), None)

    def _unshown(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        covers, lent = self._context.hold.known_finite.covers, self._context.frameworks.lent.get(optimizer)
        if lent is not None:
            return [gradient for _, gradient in lent if not covers(gradient, gradient)]
        found = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # Asked for once: a gradient that nobody holds gets a new Python object each time.
                gradient = parameter.grad
                if gradient is None or covers(parameter, gradient):
                    continue
                part = local(gradient) if hasattr(gradient, "placements") else gradient
                if part.is_sparse:
                    part = part._values()  # noqa: SLF001
                if part.layout is torch.strided and (part.is_floating_point() or part.is_complex()):
                    found.append(part)
        return found


def _is_bad(table: Any) -> bool:
    return bool((table.nans + table.pos_infs + table.neg_infs).any())
