"""Ranks that do all that they should, but later than their peers."""

import threading
from typing import TYPE_CHECKING, Any

from holter.testing.injection import Injection, replace

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader


def slow_forward(module: "nn.Module", seconds: float) -> Injection:
    """Every forward pass of this module takes this much longer."""
    return Injection(module.register_forward_pre_hook(lambda *_: pause(seconds)).remove)


def slow_backward(module: "nn.Module", seconds: float) -> Injection:
    """Every backward pass through this module takes this much longer; its output must be a tensor."""

    def when_called(_: object, __: object, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: pause(seconds))

    return Injection(module.register_forward_hook(when_called).remove)


def slow_data(loader: "DataLoader[Any]", seconds: float) -> Injection:
    """Every batch of this loader takes this much longer; with workers it is they who are slow. Holds from the next pass over it."""
    return replace(loader, "collate_fn", Pausing(loader.collate_fn, seconds))


def pause(seconds: float) -> None:
    """Do nothing, visibly, in this process."""
    if seconds < 0:
        raise ValueError(f"seconds must not be negative, got {seconds}")
    threading.Event().wait(seconds)


class Pausing:
    """Calls after a pause; can be pickled if what it calls can, for workers that are spawned."""

    def __init__(self, call: Any, seconds: float) -> None:
        self.call, self.seconds = call, seconds

    def __call__(self, *args: Any) -> Any:
        """As the call itself, later."""
        pause(self.seconds)
        return self.call(*args)
