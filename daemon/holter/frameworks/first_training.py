"""Notices when a process begins to train: when it builds an optimizer, or runs a backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def then(call: Callable[[], None]) -> None:
    """Call once, before the first optimizer is built or the first backward pass runs; then the original functions are restored."""
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
        # Looked up again, because a hook of what watches from now on may be there.
        torch.optim.Optimizer.__init__(self, *args, **kwargs)

    @functools.wraps(backward)
    def running(*args: Any, **kwargs: Any) -> None:
        begin()
        torch.autograd.backward(*args, **kwargs)

    torch.optim.Optimizer.__init__ = building
    torch.autograd.backward = running
