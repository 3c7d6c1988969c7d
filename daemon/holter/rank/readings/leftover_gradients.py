"""What is left in the gradients when the first backward pass of a step begins: nothing, unless nobody clears them.

Taken of a few parameters of each optimizer, and believed only of the optimizer that then steps: in a game of two, each clears its own
gradients at its own time.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from holter.rank.context import Context
from holter.rank.readings.samples import is_readable, local, spread

NUM_WATCHED = 4
MAX_OPTIMIZERS = 4
MAX_NUMEL = 1 << 20
TOLD_CHECKS = (4, 5, 16, 17)
"""Left for so many steps of comparison, it is worth saying at once: twice, for once is believed by nobody."""


class Leftovers:
    """Counts the steps that began with old gradients."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._left: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, float]] = weakref.WeakKeyDictionary()
        """Step, and norm of what was left at its beginning."""
        self._first = 0.0
        self.num_checks = 0
        """In a row."""
        self.growth = 0.0
        """Norm of the leftovers over what it was at the first of those."""

    def take(self) -> None:
        """The first backward pass of a step is about to begin."""
        step = self._context.log.step
        for optimizer, references in list(self._watched.items())[:MAX_OPTIMIZERS]:
            gradients = [p.grad for reference in references if (p := reference()) is not None and p.grad is not None]
            gradients = [g for g in gradients if not g.is_sparse and is_readable(local(g))]
            if not gradients:
                self._left[optimizer] = step, 0.0
                continue
            name = f"leftovers{id(optimizer)}"
            self._context.readings.read(name, gradients, self._learn(weakref.ref(optimizer), step))

    def _learn(self, reference: "weakref.ref[torch.optim.Optimizer]", step: int) -> Any:
        def learn(table: Any) -> None:
            optimizer = reference()
            if optimizer is not None:
                self._left[optimizer] = step, math.sqrt(float(table.square_sum.sum()))

        return learn

    def judge(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """These are about to step: was theirs cleared before? From a device the answer may be one of an earlier step."""
        taken = [self._left.pop(optimizer) for optimizer in optimizers if optimizer in self._left]
        if taken:
            norm = max(norm for _, norm in taken)
            if norm > 0:
                self._first = self._first if self.num_checks else norm
                self.num_checks += 1
                self.growth = norm / self._first
            else:
                self.num_checks, self.growth = 0, 0.0
        for optimizer in optimizers:
            self._watch(optimizer)

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        held = [p for p in held if p.numel() <= MAX_NUMEL] or held[:1]
        self._watched[optimizer] = [weakref.ref(held[index]) for index in spread(len(held), NUM_WATCHED)]
