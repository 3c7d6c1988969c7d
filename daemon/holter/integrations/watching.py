"""`holter.watch`: the explicit way on. Attaching twice is once; what is passed is watched in addition."""

import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holter.integrations import loop
from holter.records import Logged


class Watch:
    """What `holter.watch(model, optimizer)` gives back."""

    def log(self, **values: Any) -> None:
        """Tell what only the script knows: kl, entropy, loss_terms={...}; numbers and tensors on the host."""
        log(values)


def watch(first: Any, optimizer: Any = None) -> Any:
    """`watch(accelerator)` gives the accelerator back; `watch(model, optimizer)` gives a Watch."""
    is_accelerator = hasattr(first, "prepare") and hasattr(first, "backward")
    attachment = loop.attach("accelerate" if is_accelerator else "loop")
    models = list(getattr(first, "_models", ())) if is_accelerator else [first]
    if attachment is not None:
        for model in models:
            attachment.monitor.add_model(model)
    del optimizer  # Known by itself when it first steps.
    return first if is_accelerator else Watch()


def log(values: Mapping[str, Any]) -> None:
    """Write numbers to the page, beside the step they belong to; never raises."""
    attachment = loop.attach()
    if attachment is None:
        return
    context = attachment.monitor.context

    def say() -> None:
        numbers = dict(_numbers(values, ""))
        if numbers:
            context.recorder.say(context.log.step, Logged(values=numbers))

    context.guard.wrap(say)()


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, numbers.Real):
            yield prefix + name, float(value)
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel():
            yield prefix + name, float(value.detach().double().mean())
