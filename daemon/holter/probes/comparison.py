"""Tensors that must be equal on all replicas: one root fingerprint a class, at steps of comparison.

    the model is called     buffers                DDP has just broadcast them; after the call they are the rank's own
    before the optimizer    parameters, gradients  as the optimizer is given them
    after the optimizer     parameters             and, every fourth comparison, its state: twice the parameters to read

The tables behind the roots go over all entries of the census, in its order, 0 where there is nothing to compare.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from holter import clock
from holter.probes.context import Context
from holter.records import PackedTable
from holter_kernels import root

STATE_EVERY = 4
"""Comparisons between two readings of the optimizer's state."""

Entry: TypeAlias = "torch.Tensor | None"


class ComparisonProbe:
    """Fingerprints what DDP keeps equal."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def is_due(self) -> bool:
        """Whether this is a step of comparison, and there is somebody to compare with."""
        return self.is_possible() and self._context.schedule.plan.is_check(self._context.log.step)

    def is_possible(self) -> bool:
        """Whether there are replicas: known from the wrapper, never guessed."""
        return self._context.world_size > 1 and any(model.is_replicated for model in self._context.models)

    def parameters(self, moment: Literal["before", "after"]) -> None:
        """All parameters, frozen ones too."""
        self._read(f"parameters_{moment}", [p if is_replicated else None for p, is_replicated in self._parameters()])

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients that one optimizer is given."""
        held = _held(optimizer)
        entries = [p.grad if is_replicated and id(p) in held else None for p, is_replicated in self._parameters()]
        self._read("gradients", entries)

    def buffers(self) -> None:
        """Normalisation statistics and tables."""
        entries = [
            buffer if model.is_replicated else None for model in self._context.models for _, buffer in model.buffers
        ]
        self._read("buffers", entries, over="buffers")

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Moments and whatever else the optimizer keeps for a parameter."""
        plan = self._context.schedule.plan
        if self._context.log.step // plan.check_interval % STATE_EVERY:
            return
        held = _held(optimizer)
        states = [
            optimizer.state.get(p, {}) if is_replicated and id(p) in held else {}
            for p, is_replicated in self._parameters()
        ]
        keys = sorted({key for state in states for key, value in state.items() if isinstance(value, torch.Tensor)})
        entries = [_tensor(state.get(key)) for key in keys for state in states]
        self._read("optimizer_state", entries, keys=keys)

    def _parameters(self) -> list[tuple[torch.nn.Parameter, bool]]:
        return [(p, model.is_replicated) for model in self._context.models for _, p in model.parameters]

    def _read(
        self,
        tensor_class: str,
        entries: Sequence[Entry],
        *,
        over: Literal["parameters", "buffers"] = "parameters",
        keys: Sequence[str] = (),
    ) -> None:
        context, step = self._context, self._context.log.now
        started = clock.monotonic_s()
        chosen = [
            (place, tensor) for place, tensor in enumerate(entries) if tensor is not None and not tensor.is_sparse
        ]
        places = np.array([place for place, _ in chosen], dtype=np.int64)

        def learn(table: Any) -> None:
            fingerprints, norms = np.zeros(len(entries), dtype="<u8"), np.zeros(len(entries), dtype="<f4")
            fingerprints[places] = table.fingerprint
            with np.errstate(over="ignore", invalid="ignore"):
                norms[places] = np.sqrt(table.square_sum)
            step.roots[tensor_class] = int(root(fingerprints))
            packed = PackedTable(
                tensor_class=tensor_class,
                root=step.roots[tensor_class],
                fingerprints=fingerprints.tobytes(),
                norms=norms.tobytes(),
                over=over,
                keys=list(keys),
            )
            context.recorder.say(step.step, packed)

        context.readings.read(tensor_class, [tensor for _, tensor in chosen], step.owe(learn))
        step.check_s += clock.monotonic_s() - started


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _tensor(value: Any) -> Entry:
    return value if isinstance(value, torch.Tensor) else None
