"""Models, schedulers and loss scalers, found among all living objects of the interpreter: nobody tells us of them.

A search takes a fraction of a second, so it is made only now and then.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler


def living(kind: type) -> Iterator[Any]:
    """All living objects of a class. By `type`, not `isinstance`: that would ask lazy proxies for their class and wake them up."""
    return (each for each in gc.get_objects() if issubclass(type(each), kind))


def top_level() -> list[Any]:
    """Modules that are no other module's child."""
    kinds = _kinds()
    modules = [thing for thing in gc.get_objects() if type(thing) in kinds]
    children = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in children]


def _kinds() -> set[type]:
    """All classes of modules: to look a type up in a set is ten times faster than `issubclass`."""
    found: set[type] = set()
    new: list[type] = [torch.nn.Module]
    while new:
        kind = new.pop()
        if kind not in found:
            found.add(kind)
            new += type.__subclasses__(kind)
    return found


def _children(module: Any) -> list[Any]:
    # Half-built, lazy and compiled modules come by here too, and may raise.
    try:
        return [child for child in module._modules.values() if child is not None]  # noqa: SLF001
    except (AttributeError, RuntimeError, TypeError):
        return []


def parameters_of(module: Any) -> list[Any]:
    """The parameters of a module, without those that are not initialised yet."""
    try:
        return [p for p in module.parameters() if not isinstance(p, UninitializedParameter)]
    except (AttributeError, RuntimeError, TypeError):
        return []


def innermost(optimizer: Any) -> Any:
    """Torch's own optimizer inside a framework's wrappers: its step does the work."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer


def schedulers(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """The schedulers of these optimizers, without the parts of a chain of schedulers."""
    ours = {id(innermost(optimizer)) for optimizer in optimizers}
    # The Trainer gives its scheduler accelerate's wrapper of the optimizer.
    found = [each for each in living(LRScheduler) if id(innermost(getattr(each, "optimizer", None))) in ours]
    parts = {id(part) for each in found for part in getattr(each, "_schedulers", ())}
    return [each for each in found if id(each) not in parts]


def scalers() -> list[Any]:
    """All loss scalers that are enabled."""
    return [scaler for scaler in living(torch.amp.GradScaler) if scaler.is_enabled()]
