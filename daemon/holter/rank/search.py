"""Modules, and other things, among all objects of the interpreter: a fraction of a second, so only now and then."""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter


def living(kind: type) -> Iterator[Any]:
    """All living objects of a class. By `type`, not `isinstance`: lazy proxies would be asked what they are and wake up."""
    return (each for each in gc.get_objects() if issubclass(type(each), kind))


def top_level() -> list[Any]:
    """Modules that are no other module's child."""
    kinds = _kinds()
    modules = [thing for thing in gc.get_objects() if type(thing) in kinds]
    children = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in children]


def _kinds() -> set[type]:
    """All classes of modules: to look a type up is ten times faster than to ask about its ancestors."""
    found: set[type] = set()
    new: list[type] = [torch.nn.Module]
    while new:
        kind = new.pop()
        if kind not in found:
            found.add(kind)
            new += type.__subclasses__(kind)
    return found


def _children(module: Any) -> list[Any]:
    # Modules that are half built, lazy or compiled are met here too, and answer in their own ways.
    try:
        return [child for child in module._modules.values() if child is not None]  # noqa: SLF001
    except (AttributeError, RuntimeError, TypeError):
        return []


def parameters_of(module: Any) -> list[Any]:
    """Its parameters, as far as they exist yet."""
    try:
        return [p for p in module.parameters() if not isinstance(p, UninitializedParameter)]
    except (AttributeError, RuntimeError, TypeError):
        return []
