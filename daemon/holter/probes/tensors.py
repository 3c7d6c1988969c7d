"""Gradients and parameters, read by the schedule: the rank's own gradients, the reduced ones, the weights around the step.

    end of backward       the rank's own gradients, before any reduction      statistics, at every step
    before the optimizer  the gradients it is given, and the parameters       fingerprints, at steps of comparison
    after the optimizer   the parameters                                      fingerprints, at steps of comparison

Fingerprints go over all parameters of the census, in its order, 0 where there is none to compare.
"""

import math
from typing import Any

import numpy as np
import torch

from holter import clock
from holter.probes.context import Context
from holter.probes.models import Model
from holter.probes.steplog import OpenStep
from holter.records import Nonfinite, PackedTable, Where
from holter_kernels import root


class TensorProbe:
    """Reads what the models hold."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.ready_order: list[int] = []
        """Ids of parameters in the order their gradients became ready, from the first backward pass."""

    def follow_order(self) -> list[Any]:
        """Hooks that learn in which order backward reaches the parameters; for one pass."""
        seen = self.ready_order
        return [
            p.register_post_accumulate_grad_hook(lambda parameter: seen.append(id(parameter)))
            for model in self._context.models
            for _, p in model.parameters
            if p.requires_grad
        ]

    def read_local(self) -> None:
        """The rank's own gradients, where the framework still shows them."""
        context = self._context
        step = context.log.now
        for model in context.models:
            if not model.shows_local_gradients():
                continue
            named = [(name, p) for name, p in model.parameters if p.grad is not None and not p.grad.is_sparse]
            chosen = [named[i] for i in context.schedule.plan.share(step.step, len(named))]
            self._read_gradients(model, step, chosen, "gradient", is_whole=len(chosen) == len(named))

    def read_applied(self, optimizer: torch.optim.Optimizer) -> None:
        """What the optimizer is about to apply: read if something is suspected, or if nothing was seen before the reduction."""
        step = self._context.log.now
        # What a device still owes may turn out to be a suspect.
        is_suspected = bool(step.suspects) or step.num_owed > 0
        models = [model for model in self._context.models if is_suspected or not model.shows_local_gradients()]
        if not models:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in models:
            named = [(name, p) for name, p in model.parameters if id(p) in held and p.grad is not None]
            named = [(name, p) for name, p in named if not p.grad.is_sparse]
            self._read_gradients(model, step, named, "reduced_gradient", is_whole=True)

    def _read_gradients(
        self, model: Model, step: OpenStep, named: list[tuple[str, Any]], where: Where, *, is_whole: bool
    ) -> None:
        def learn(table: Any) -> None:
            bad = table.nans + table.pos_infs + table.neg_infs
            if is_whole and (where == "gradient" or step.gradient_norm is None):
                # The table sums what is finite.
                step.gradient_norm = math.nan if bad.any() else math.sqrt(float(table.square_sum.sum()))
            for row in np.flatnonzero(bad):
                name, parameter = named[row]
                step.is_applied |= where == "reduced_gradient"
                step.suspect(
                    Nonfinite(
                        where=where,
                        name=name,
                        nans=int(table.nans[row]),
                        infs=int(bad[row] - table.nans[row]),
                        numel=parameter.numel(),
                        order=self.ready_order.index(id(parameter)) if id(parameter) in self.ready_order else 0,
                    )
                )

        started = clock.monotonic_s()
        self._context.readings.read(where + model.prefix, [p.grad for _, p in named], step.owe(learn))
        if where == "gradient":
            step.gradients_s += clock.monotonic_s() - started

    def compare(self, tensor_class: str, *, gradients_of: torch.optim.Optimizer | None = None) -> None:
        """Fingerprint a class of tensors that must be equal on all replicas."""
        context = self._context
        step = context.log.now
        started = clock.monotonic_s()
        held = {id(p) for group in gradients_of.param_groups for p in group["params"]} if gradients_of else None
        chosen: list[tuple[int, torch.Tensor]] = []
        index = -1
        for model in context.models:
            for _, parameter in model.parameters:
                index += 1
                tensor: Any = parameter if held is None else parameter.grad if id(parameter) in held else None
                if model.is_replicated and tensor is not None and not tensor.is_sparse:
                    chosen.append((index, tensor))
        places = np.array([place for place, _ in chosen], dtype=np.int64)
        count = index + 1

        def learn(table: Any) -> None:
            fingerprints = np.zeros(count, dtype="<u8")
            fingerprints[places] = table.fingerprint
            norms = np.zeros(count, dtype="<f4")
            with np.errstate(over="ignore", invalid="ignore"):
                norms[places] = np.sqrt(table.square_sum)
            whole = int(root(fingerprints))
            step.roots[tensor_class] = whole
            context.recorder.say(
                step.step,
                PackedTable(
                    tensor_class=tensor_class, root=whole, fingerprints=fingerprints.tobytes(), norms=norms.tobytes()
                ),
            )

        context.readings.read(tensor_class, [tensor for _, tensor in chosen], step.owe(learn))
        step.check_s += clock.monotonic_s() - started
