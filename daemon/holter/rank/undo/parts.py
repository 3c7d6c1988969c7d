"""The parts of a training state: what is to be copied of each, and how it goes back into the living object.

None of them holds what it is of: a model that the script lets go of is gone.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holter.errors import RewindError
from holter.rank.framework import Frameworks
from holter.rank.models import Model
from holter.rank.undo import images
from holter.rank.undo.buffers import MovingBuffers

Copies = Sequence[torch.Tensor]


@dataclass(frozen=True)
class StatePart:
    """One part, as it is now."""

    owner: "weakref.ref[Any]"
    state: Any
    """Dicts, lists and tuples of plain values and of the living tensors."""
    put: Callable[[Any, Any, Copies], None]
    """Owner, image of the state and copies of its tensors -> the owner is as it was."""
    is_moving: bool = False
    """May change while the forward pass runs: copied before it."""
    apart: tuple[Any, ...] = ()
    """What its plain values may name and must not be copied with them."""


def of_weight(parameter: torch.nn.Parameter, *, is_moving: bool) -> StatePart:
    """Nobody knows when one moves that no optimizer moves."""
    return StatePart(weakref.ref(parameter), parameter, _put_weight, is_moving)


def _put_weight(parameter: Any, image: Any, copies: Copies) -> None:
    if images.put(parameter, image, copies) is not parameter:
        raise RewindError(f"a parameter is now {tuple(parameter.shape)}, and was {tuple(copies[image.index].shape)}")


def of_buffers(kept: MovingBuffers) -> list[StatePart]:
    """As the step's first forward pass finds them: copies of ours, which nobody changes before the next, where there are any."""

    def put_under(name: str) -> Callable[[Any, Any, Copies], None]:
        def put(module: Any, image: Any, copies: Copies) -> None:
            module._buffers[name] = images.put(module._buffers.get(name), image, copies)  # noqa: SLF001

        return put

    return [StatePart(module, tensor, put_under(name), is_moving) for module, name, tensor, is_moving in kept.found()]


def of_optimizer(optimizer: torch.optim.Optimizer) -> StatePart:
    """Its state and the hyper-parameters of its groups."""
    keys = [weakref.ref(key) if isinstance(key, torch.Tensor) else key for key in optimizer.state]
    held = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    state = {
        "groups": [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups],
        "state": list(optimizer.state.values()),
    }

    def put(live: Any, image: Any, copies: Copies) -> None:
        if held != [[id(parameter) for parameter in group["params"]] for group in live.param_groups]:
            raise RewindError(f"{type(live).__name__} was given other parameters since")
        for group, kept in zip(live.param_groups, image["groups"], strict=True):
            params = group.pop("params")
            hyper = images.put(dict(group), kept, copies)
            group.clear()
            group.update(params=params, **hyper)
        owners = [key() if isinstance(key, weakref.ref) else key for key in keys]
        entries = [
            images.put(live.state.get(key), kept, copies) for key, kept in zip(owners, image["state"], strict=True)
        ]
        live.state.clear()
        live.state.update(zip(owners, entries, strict=True))

    return StatePart(weakref.ref(optimizer), state, put)


def of_scheduler(scheduler: Any) -> StatePart:
    """By its own state_dict; its optimizer is a part of its own."""

    def put(live: Any, image: Any, copies: Copies) -> None:
        live.load_state_dict(images.put(None, image, copies))

    return StatePart(weakref.ref(scheduler), scheduler.state_dict(), put, True, (scheduler, scheduler.optimizer))


SCALING = ("_scale", "_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval")


def of_scaler(scaler: Any) -> StatePart:
    """Not by its state_dict, which waits for the device."""

    def put(live: Any, image: Any, copies: Copies) -> None:
        for name, kept in image.items():
            setattr(live, name, images.put(getattr(live, name), kept, copies))

    return StatePart(weakref.ref(scaler), {name: getattr(scaler, name) for name in SCALING}, put)


def parameters_of(models: Sequence[Model], frameworks: Frameworks) -> Iterator[torch.nn.Parameter]:
    """Every parameter once; of a sharded one, the shard that the optimizer steps."""
    seen: set[int] = set()
    for root in (model.root for model in models):
        shards = frameworks.sharded(root) if root is not None else {}
        for module in root.modules() if root is not None else ():
            for name, shown in module._parameters.items():  # noqa: SLF001
                parameter = shards.get((id(module), name), shown)
                if parameter is not None and id(parameter) not in seen and not parameter.is_meta:
                    seen.add(id(parameter))
                    yield parameter
