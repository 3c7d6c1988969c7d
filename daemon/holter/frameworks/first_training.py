"""Notices that a process begins to train: it builds an optimizer, or runs a backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def then(call: Callable[[], None]) -> None:
    """Call once, before the first optimizer is built or the first backward pass runs; what stood there before is put back."""
    build, backward = torch.optim.Optimizer.__init__, torch.autograd.backward

    def begin() -> None:
        if torch.optim.Optimizer.__init__ is building:
            torch.optim.Optimizer.__init__ = build
        if torch.autograd.backward is running:
            torch.autograd.backward = backward
        call()

    @functools.wraps(build)
    def building(self: Any, *args: Any, **kwargs: Any) -> None:
        begin()
        # By its name: what watches from now on may stand there.
        torch.optim.Optimizer.__init__(self, *args, **kwargs)

    @functools.wraps(backward)
    def running(*args: Any, **kwargs: Any) -> None:
        begin()
        torch.autograd.backward(*args, **kwargs)

    torch.optim.Optimizer.__init__ = building
    torch.autograd.backward = running
