"""Tensors that must be equal on all replicas: one root fingerprint a class, at steps of comparison.

    the model is called     buffers                DDP has just broadcast them; after the call they are the rank's own
    before the optimizer    parameters, gradients  as the optimizer is given them
    after the optimizer     parameters             and, every fourth comparison, its state: twice the parameters to read

The tables behind the roots go over all entries of the census, in its order, 0 where there is nothing to compare. Only models that the
step's own optimizers train take part: what else a rank still holds, an average or the model of a fold that is over, is its own.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from holter import clock
from holter.probes.context import Context
from holter.probes.models import Model
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

    def parameters(self, moment: Literal["before", "after"], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """All parameters of the models that these optimizers train, frozen ones too."""
        models = self._trained_by(optimizers)
        entries = [(p, model in models) for model in self._context.models for _, p in model.parameters]
        self._read(f"parameters_{moment}", entries)

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients that one optimizer is given."""
        held, models = _held([optimizer]), self._trained_by([optimizer])
        entries = [
            (p.grad if id(p) in held else None, model in models)
            for model in self._context.models
            for _, p in model.parameters
        ]
        self._read("gradients", entries)

    def reduced_gradients(self) -> None:
        """Gradients as a backward pass that reduces left them, before any clipping."""

    def frozen(self) -> None:
        """Parameters that do not train."""

    def hyperparameters(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Learning rates and other settings, and step counts."""

    def buffers(self, model: Model) -> None:
        """Normalisation statistics and tables of a model that is being called."""
        if model.is_replicated:
            entries = [(buffer, other is model) for other in self._context.models for _, buffer in other.buffers]
            self._read("buffers", entries, over="buffers")

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Moments and whatever else the optimizer keeps for a parameter."""
        plan = self._context.schedule.plan
        if self._context.log.step // plan.check_interval % STATE_EVERY:
            return
        models = self._trained_by([optimizer])
        states = [
            (optimizer.state.get(p, {}), model in models) for model in self._context.models for _, p in model.parameters
        ]
        keys = sorted({key for state, _ in states for key, value in state.items() if isinstance(value, torch.Tensor)})
        entries = [(_tensor(state.get(key)), is_replica) for key in keys for state, is_replica in states]
        self._read("optimizer_state", entries, keys=keys)

    def _trained_by(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Model]:
        held = _held(optimizers)
        return [
            model
            for model in self._context.models
            if model.is_replicated and any(id(p) in held for _, p in model.parameters)
        ]

    def _read(
        self,
        tensor_class: str,
        entries: Sequence[tuple[Entry, bool]],
        *,
        over: Literal["parameters", "buffers"] = "parameters",
        keys: Sequence[str] = (),
    ) -> None:
        """Entries of the census, and whether each belongs to a replica; the root goes over those that do."""
        context, step = self._context, self._context.log.now
        started = clock.monotonic_s()
        replicas = np.array([is_replica for _, is_replica in entries], dtype=bool)
        chosen = [(place, t) for place, (t, is_replica) in enumerate(entries) if is_replica and t is not None]
        chosen = [(place, tensor) for place, tensor in chosen if not tensor.is_sparse]
        if not chosen:
            return
        places = np.array([place for place, _ in chosen], dtype=np.int64)

        def learn(table: Any) -> None:
            fingerprints, norms = np.zeros(len(entries), dtype="<u8"), np.zeros(len(entries), dtype="<f4")
            fingerprints[places] = table.fingerprint
            with np.errstate(over="ignore", invalid="ignore"):
                norms[places] = np.sqrt(table.square_sum)
            step.roots[tensor_class] = int(root(fingerprints[replicas]))
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


def _held(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _tensor(value: Any) -> Entry:
    return value if isinstance(value, torch.Tensor) else None
