"""Gathers what a snapshot is made of: parameters, optimizers, schedulers, scalers, and counters of frameworks.

Parameters are gone through at every snapshot. What has to be looked for among all living objects is looked for again only when an optimizer,
or one of those that were found, has come or gone, and at every snapshot whose number is a power of two: a scheduler may have come late.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from holter.rank import state_objects
from holter.rank.framework import Frameworks
from holter.rank.models import Models
from holter.rank.undo import parts
from holter.rank.undo.buffers import MovingBuffers
from holter.rank.undo.parts import StatePart

ENGINES = frozenset({"DeepSpeedEngine"})
"""Wrappers that keep weights and counters where we do not find them."""
Source = Callable[[], StatePart | None]
"""A part as it is now; None: it is gone."""
Resting = tuple["weakref.ref[torch.nn.Parameter]", int]
"""A parameter that nobody trains, with the number of its changes when it was first seen."""


def source_of(make: Callable[[Any], StatePart], owner: Any) -> Source:
    """Makes the part of this object, as long as it lives."""
    reference = weakref.ref(owner)
    return lambda: make(living) if (living := reference()) is not None else None


class Gathering:
    """Of one rank."""

    def __init__(
        self, models: Models, frameworks: Frameworks, optimizers: Callable[[], list[torch.optim.Optimizer]]
    ) -> None:
        self._models = models
        self._frameworks = frameworks
        self._optimizers = optimizers
        self._sources: list[Source] = []
        self._sources_of: list[weakref.ref[torch.optim.Optimizer]] = []
        self._frozen: dict[int, Resting] = {}
        """By id."""
        self._num_gathered = 0

    def engine(self) -> str:
        """The wrapper that is not fathomed; empty: there is none."""
        return next((model.wrapper for model in self._models if model.wrapper in ENGINES), "")

    def gather(self, buffers: MovingBuffers) -> tuple[list[StatePart], list[Resting]]:
        """All there is to copy, and the parameters that rest."""
        weights, resting = self._weights()
        return [*weights, *parts.of_buffers(buffers), *self._others()], resting

    def _weights(self) -> tuple[list[StatePart], list[Resting]]:
        held = {id(p) for optimizer in self._optimizers() for group in optimizer.param_groups for p in group["params"]}
        found: list[StatePart] = []
        resting: list[Resting] = []
        frozen: dict[int, Resting] = {}
        for parameter in parts.parameters_of(self._models.all(), self._frameworks):
            if parameter.requires_grad or id(parameter) in held:
                found.append(parts.of_weight(parameter, is_moving=False))
                continue
            first = self._frozen.get(id(parameter))
            if first is None or first[0]() is not parameter:
                first = weakref.ref(parameter), parameter._version  # noqa: SLF001
            frozen[id(parameter)] = first
            if first[1] == parameter._version:  # noqa: SLF001
                resting.append(first)
            else:
                found.append(parts.of_weight(parameter, is_moving=True))
        self._frozen = frozen
        return found, resting

    def _others(self) -> list[StatePart]:
        """Optimizers, schedulers, scalers and counters."""
        optimizers = self._optimizers()
        self._num_gathered += 1
        is_turn = self._num_gathered & (self._num_gathered - 1) == 0
        found: list[StatePart | None] = [None]
        if [reference() for reference in self._sources_of] == optimizers and not is_turn:
            found = [source() for source in self._sources]
        if None in found:
            self._sources_of = [weakref.ref(optimizer) for optimizer in optimizers]
            self._sources = [source_of(parts.of_optimizer, each) for each in optimizers]
            self._sources += [source_of(parts.of_scheduler, each) for each in state_objects.schedulers(optimizers)]
            self._sources += [source_of(parts.of_scaler, each) for each in state_objects.scalers()]
            self._sources += self._frameworks.counters(optimizers)
            found = [source() for source in self._sources]
        return [part for part in found if part is not None]

    def in_use(self) -> list[Any]:
        """Optimizers, schedulers and scalers that a checkpoint would be made of now."""
        optimizers = self._optimizers()
        return [*optimizers, *state_objects.schedulers(optimizers), *state_objects.scalers()]
