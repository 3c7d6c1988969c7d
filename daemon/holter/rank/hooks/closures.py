"""Closures: an optimizer that computes its gradients inside its own step is held between the two.

    optimizer.step(closure)
    ├─ our hook            nothing is computed yet
    ├─ closure()           forward, backward                     nothing is applied: a rescue may take what is there
    ├─ our hook again      are the gradients finite? the rank may be held, as before a step without a closure
    └─ the step is applied

torch's own optimizers, all but LBFGS, call the closure first and once. Others may already have written to the weights by then (a sharpness-aware
one steps away from them and back): they are left alone, and so is any whose parameters were written to since its step began.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `step` was given a closure; `args` begins with the optimizer."""
    return (len(args) > 1 and any(given is not None for given in args[1:])) or kwargs.get("closure") is not None


def is_followed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer is known to call its closure before it changes any weight."""
    is_torchs = any(
        f"{kind.__module__}.".startswith("torch.optim.")  # of Muon and Adafactor it is "torch.optim"
        for kind in type(optimizer).__mro__
        if kind is not torch.optim.Optimizer
    )
    return is_torchs and not isinstance(optimizer, torch.optim.LBFGS)


def follow(
    args: tuple[Any, ...], kwargs: dict[str, Any], begin: Callable[[], None], end: Callable[[bool], None]
) -> Arguments | None:
    """Return the arguments with a closure that calls `begin` and `end` around the script's own, the first time it runs.

    `end` is given whether the parameters were still unwritten by then. An exception of the closure passes through.
    Return None if there is no closure that could be replaced.
    """
    closure = kwargs.get("closure") if "closure" in kwargs else next(iter(args[1:]), None)
    if not callable(closure):
        return None
    before, is_first = _versions(args[0]), True

    @functools.wraps(closure)
    def within(*given: Any, **named: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return closure(*given, **named)
        is_first = False
        begin()
        result = closure(*given, **named)
        end(_versions(args[0]) == before)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": within}
    return (args[0], within, *args[2:]), kwargs


def _versions(optimizer: torch.optim.Optimizer) -> list[int]:
    return [parameter._version for group in optimizer.param_groups for parameter in group["params"]]  # noqa: SLF001
