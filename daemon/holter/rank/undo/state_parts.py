"""Defines the parts of a training state: what is copied of each, and how it is put back into the living object.

The parts are parameters, buffers, optimizers, schedulers, scalers and a framework's counters. A part has only a weak reference to its owner, so
that a model that the script lets go of is freed.

The state of a part becomes an image: plain values are copied at once, tensors are taken out, to be copied elsewhere and perhaps later.

    {"step": 3, "exp_avg": tensor}       ──take_image──▶   {"step": 3, "exp_avg": TensorSlot(0)}   and   [tensor]
    put_image(live, image, copies)       ──▶               copies go into the memory of the live tensors; missing tensors are made anew
"""

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from holter.errors import RewindError
from holter.rank import search
from holter.rank.framework import Frameworks
from holter.rank.models import Model, Models, held_by
from holter.rank.readings.samples import local
from holter.rank.undo.buffers import MovingBuffers

_DICTS = (dict, OrderedDict)
SCALING = ("_scale", "_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval")
ENGINES = frozenset({"DeepSpeedEngine"})
"""Class names of wrappers that keep weights and counters where we do not find them."""


@dataclass(frozen=True)
class TensorSlot:
    """Takes the place of a tensor in an image."""

    index: int
    device: torch.device
    is_placed: bool
    """Whether it is a DTensor, of which only its owner can make another."""


def take_image(state: Any, tensors: list[torch.Tensor], apart: Sequence[Any] = ()) -> Any:
    """Return the image of a state, and append its tensors to `tensors`. Objects in `apart` are referred to, not copied."""
    if isinstance(state, torch.Tensor):
        tensors.append(state)
        return TensorSlot(len(tensors) - 1, state.device, hasattr(state, "placements"))
    if type(state) in _DICTS:
        return {key: take_image(value, tensors, apart) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(take_image(value, tensors, apart) for value in state)
    # A scheduler's state may hold methods of its own: a deep copy of them would take the optimizer along.
    return copy.deepcopy(state, {id(each): each for each in apart})


def put_image(live: Any, image: Any, copies: Sequence[torch.Tensor]) -> Any:
    """Return the state of an image, written into the memory of `live` where it fits.

    Plain values are handed over, not copied, so an image can be put back only once.
    """
    if isinstance(image, TensorSlot):
        return _put_tensor(live, image, copies[image.index])
    if type(image) is dict:
        into = live if type(live) in _DICTS else {}
        for key in into.keys() - image.keys():
            del into[key]
        for key, value in image.items():
            into[key] = put_image(into.get(key), value, copies)
        return into
    if type(image) in (list, tuple):
        olds = live if type(live) is type(image) else ()
        return type(image)(
            put_image(old, value, copies) for old, value in zip_longest(olds[: len(image)], image, fillvalue=None)
        )
    return image


def _put_tensor(live: Any, slot: TensorSlot, kept: torch.Tensor) -> torch.Tensor:
    if isinstance(live, torch.Tensor):
        held = local(live)
        if (held.shape, held.dtype) == (kept.shape, kept.dtype):
            held.copy_(kept)
            return live
    if slot.is_placed:
        raise RewindError("a sharded tensor that was copied does not exist any more")
    return kept.to(slot.device, copy=True)


Copies = Sequence[torch.Tensor]


@dataclass(frozen=True)
class StatePart:
    """One part of the training state, as it is now."""

    owner: "weakref.ref[Any]"
    state: Any
    """Nested dicts, lists and tuples of plain values and of the living tensors."""
    put: Callable[[Any, Any, Copies], None]
    """Puts the state back; takes the owner, the image of the state and the copies of its tensors."""
    is_moving: bool = False
    """Whether it may change while the forward pass runs, and so is copied before it."""
    apart: tuple[Any, ...] = ()
    """Objects that its plain values may refer to and that must not be copied with them."""


def of_weight(parameter: torch.nn.Parameter, *, is_moving: bool) -> StatePart:
    """Return a parameter's part; `is_moving` if no optimizer changes it, so that we do not know when it changes."""
    return StatePart(weakref.ref(parameter), parameter, _put_weight, is_moving)


def _put_weight(parameter: Any, image: Any, copies: Copies) -> None:
    if put_image(parameter, image, copies) is not parameter:
        raise RewindError(f"a parameter is now {tuple(parameter.shape)}, and was {tuple(copies[image.index].shape)}")


def of_buffers(kept: MovingBuffers) -> list[StatePart]:
    """Return the buffers' parts as the step's first forward pass finds them: our copies where there are any, which stay the same until the next step."""

    def put_under(name: str) -> Callable[[Any, Any, Copies], None]:
        def put(module: Any, image: Any, copies: Copies) -> None:
            module._buffers[name] = put_image(module._buffers.get(name), image, copies)  # noqa: SLF001

        return put

    return [StatePart(module, tensor, put_under(name), is_moving) for module, name, tensor, is_moving in kept.found()]


def of_optimizer(optimizer: torch.optim.Optimizer) -> StatePart:
    """Return an optimizer's part: its state and the hyperparameters of its groups."""
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
            hyper = put_image(dict(group), kept, copies)
            group.clear()
            group.update(params=params, **hyper)
        owners = [key() if isinstance(key, weakref.ref) else key for key in keys]
        entries = [
            put_image(live.state.get(key), kept, copies) for key, kept in zip(owners, image["state"], strict=True)
        ]
        live.state.clear()
        live.state.update(zip(owners, entries, strict=True))

    return StatePart(weakref.ref(optimizer), state, put)


def of_groups(optimizer: torch.optim.Optimizer) -> StatePart:
    """Return a part with only the hyperparameters of an optimizer's groups."""
    state = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]

    def put(live: Any, image: Any, copies: Copies) -> None:
        if len(live.param_groups) != len(image):
            raise RewindError(f"{type(live).__name__} was given other groups since")
        for group, kept in zip(live.param_groups, image, strict=True):
            group.update(put_image({key: group[key] for key in kept if key in group}, kept, copies))

    return StatePart(weakref.ref(optimizer), state, put)


def of_scheduler(scheduler: Any) -> StatePart:
    """Return a scheduler's part, made from its state_dict; its optimizer is a separate part."""

    def put(live: Any, image: Any, copies: Copies) -> None:
        live.load_state_dict(put_image(None, image, copies))

    return StatePart(weakref.ref(scheduler), scheduler.state_dict(), put, True, (scheduler, scheduler.optimizer))


def of_scaler(scaler: Any) -> StatePart:
    """Return a loss scaler's part, made from its attributes because its state_dict would wait for the device."""

    def put(live: Any, image: Any, copies: Copies) -> None:
        for name, kept in image.items():
            setattr(live, name, put_image(getattr(live, name), kept, copies))

    return StatePart(weakref.ref(scaler), {name: getattr(scaler, name) for name in SCALING}, put)


def parameters_of(models: Sequence[Model], frameworks: Frameworks) -> Iterator[torch.nn.Parameter]:
    """Yield every parameter once; of a sharded one, the shard that the optimizer steps."""
    seen: set[int] = set()
    for root in (model.root for model in models):
        shards = frameworks.sharded(root) if root is not None else {}
        for module in root.modules() if root is not None else ():
            for name, shown in module._parameters.items():  # noqa: SLF001
                parameter = shards.get((id(module), name), shown)
                if parameter is not None and id(parameter) not in seen and not parameter.is_meta:
                    seen.add(id(parameter))
                    yield parameter


Source = Callable[[], StatePart | None]
"""Returns a part as it is now; None if its owner is gone."""


RestingParameter = tuple["weakref.ref[torch.nn.Parameter]", int]
"""(parameter that nobody trains, torch's count of its changes when it was first seen)."""


def source_of(make: Callable[[Any], StatePart], owner: Any) -> Source:
    """Return a function that makes the part of this object as long as it lives, and then returns None."""
    reference = weakref.ref(owner)
    return lambda: make(living) if (living := reference()) is not None else None


class StateGatherer:
    """Gathers the parts of one rank's state.

    It goes through the parameters at every snapshot. Schedulers and scalers have to be searched for among all living objects; that is repeated only when
    an optimizer has come or gone or a found object is gone, and at every snapshot whose number is a power of two, because a scheduler may be made late.
    """

    def __init__(
        self, models: Models, frameworks: Frameworks, optimizers: Callable[[], list[torch.optim.Optimizer]]
    ) -> None:
        self._models = models
        self._frameworks = frameworks
        self._optimizers = optimizers
        self._sources: list[Source] = []
        self._sources_of: list[weakref.ref[torch.optim.Optimizer]] = []
        self._frozen: dict[int, RestingParameter] = {}
        """Id of a frozen parameter -> the parameter and its count when it was first seen."""
        self._num_gathered = 0

    def engine(self) -> str:
        """Return the name of a wrapper whose state we cannot copy; empty if there is none."""
        return next((model.wrapper for model in self._models if model.wrapper in ENGINES), "")

    def gather(self, buffers: MovingBuffers) -> tuple[list[StatePart], list[RestingParameter]]:
        """Return all parts that are to be copied, and the parameters that do not change."""
        weights, resting = self._weights()
        return [*weights, *of_buffers(buffers), *self._others()], resting

    def _weights(self) -> tuple[list[StatePart], list[RestingParameter]]:
        held = held_by(self._optimizers())
        found: list[StatePart] = []
        resting: list[RestingParameter] = []
        frozen: dict[int, RestingParameter] = {}
        for parameter in parameters_of(self._models.all(), self._frameworks):
            if parameter.requires_grad or id(parameter) in held:
                found.append(of_weight(parameter, is_moving=False))
                continue
            first = self._frozen.get(id(parameter))
            if first is None or first[0]() is not parameter:
                first = weakref.ref(parameter), parameter._version  # noqa: SLF001
            frozen[id(parameter)] = first
            if first[1] == parameter._version:  # noqa: SLF001
                resting.append(first)
            else:
                found.append(of_weight(parameter, is_moving=True))
        self._frozen = frozen
        return found, resting

    def _others(self) -> list[StatePart]:
        """Return the parts of optimizers, schedulers, scalers and counters."""
        optimizers = self._optimizers()
        self._num_gathered += 1
        is_turn = self._num_gathered & (self._num_gathered - 1) == 0
        found: list[StatePart | None] = [None]
        if [reference() for reference in self._sources_of] == optimizers and not is_turn:
            found = [source() for source in self._sources]
        if None in found:
            self._sources_of = [weakref.ref(optimizer) for optimizer in optimizers]
            self._sources = [source_of(of_optimizer, each) for each in optimizers]
            self._sources += [source_of(of_scheduler, each) for each in search.schedulers(optimizers)]
            self._sources += [source_of(of_scaler, each) for each in search.scalers()]
            self._sources += self._frameworks.counters(optimizers)
            found = [source() for source in self._sources]
        return [part for part in found if part is not None]

    def in_use(self) -> list[Any]:
        """Return the optimizers, schedulers and scalers that a checkpoint made now would contain."""
        optimizers = self._optimizers()
        return [*optimizers, *search.schedulers(optimizers), *search.scalers()]
