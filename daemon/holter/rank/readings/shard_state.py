"""The optimizer's state of this rank's own shards: fingerprints after a step and before the next, between which nothing may change it.

    step 12                          step 13
    … optimizer   state_after@own    state_before@own   optimizer …        equal, or something wrote to it

No other rank holds a shard's moments or ZeRO's float32 partitions, so they can only be compared with their own history. Moments are twice the size
of the weights: a small state is read at every step of comparison, others at every fourth.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from holter.rank.context import Context
from holter.rank.mesh import OWN
from holter.rank.readings.census import Selection
from holter.rank.readings.samples import is_readable, local

EVERY = 4
"""A state that is not small is read at every n-th comparison."""
SMALL_BYTES = 4 << 20
"""Most bytes of a state that is read at every comparison; reading them takes some 0.2 ms."""

Read: TypeAlias = Callable[[str, Selection, Sequence[torch.Tensor]], None]
"""Reads tensors, and reports their root and table under a name."""


class ShardState:
    """Reads the optimizer's state of one rank's own shards."""

    def __init__(self, context: Context, read: Read) -> None:
        self._context, self._read = context, read
        self._left = -1
        """The step after which the state was last read; -1 before the first reading."""
        self._known: list[int] = []
        self._shards: list[tuple[str, weakref.ref[torch.optim.Optimizer], weakref.ref[Any]]] = []
        """Name, optimizer and parameter of each shard."""
        self._num_bytes = 0
        """Number of bytes of the last reading."""

    def after(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read the state after a step of comparison."""
        step, interval = self._context.log.step, self._context.schedule.plan.check_interval
        if self._num_bytes <= SMALL_BYTES or step // interval % EVERY == 0:
            self._left = step
            self._tell("state_after", optimizers)

    def before(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read the state before a step, if it was read after the step before it."""
        if self._left == self._context.log.step - 1 >= 0:
            self._tell("state_before", optimizers)

    def _tell(self, name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        state = self._context.models.outline(optimizers)
        if state != self._known:
            self._known, self._shards = state, list(self._own(optimizers))
        if not self._shards:
            self._num_bytes = 0
            return
        found = list(self._entries())
        self._num_bytes = sum(part.numel() * part.element_size() for _, _, part in found)
        if found:
            size = len(found)
            chosen = Selection(
                size,
                np.arange(size),
                [tensor for _, tensor, _ in found],
                scopes=(f"@{OWN}",) * size,
                names=[name for name, _, _ in found],
            )
            self._read(name, chosen, chosen.tensors)

    def _entries(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, tensor and this rank's part of every state tensor of its own shards."""
        for name, optimizer, parameter in self._shards:
            held, shard = optimizer(), parameter()
            for key, value in _remembered(held, shard) if held is not None and shard is not None else ():
                if isinstance(value, torch.Tensor) and is_readable(part := local(value)):
                    yield f"optimizer: {name}.{key}", value, part

    def _own(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, optimizer and tensor of this rank's own shards among those that these optimizers hold."""
        names = {
            id(parameter): name
            for model in self._context.models
            for name, parameter in model.parameters
            if model.scope_of(parameter) == f"@{OWN}"
        }
        for optimizer in optimizers:
            shards = (p for group in optimizer.param_groups for p in group["params"] if id(p) in names)
            held = self._context.frameworks.partitions.get(optimizer) or [(names[id(p)], p) for p in shards]
            yield from ((name, weakref.ref(optimizer), weakref.ref(tensor)) for name, tensor in held)


def _remembered(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Iterator[tuple[str, Any]]:
    state: Mapping[str, Any] = optimizer.state.get(parameter) or {}
    yield from sorted(state.items())


__all__ = ["ShardState"]
