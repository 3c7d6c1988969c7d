"""The weights against their own history."""

from collections.abc import Sequence

import torch

from holter.probes.context import Context


class VitalsProbe:
    """Looks at what a step changes."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def begin_backward(self) -> None:
        """The first backward pass of a step begins: see what is left in the gradients."""

    def before_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """A step of comparison is about to be applied."""

    def after_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """It was."""
