"""Gradients, read at every step.

The rank's own at the end of backward, before any reduction; where those are not shown, or something is suspected, the ones that
the optimizer is given.
"""

import math
from typing import Any

import numpy as np
import torch

from holter import clock
from holter.probes.context import Context
from holter.probes.models import Model
from holter.probes.steplog import OpenStep
from holter.records import Nonfinite, Where


class GradientProbe:
    """Looks for what is not finite, and takes the norm."""

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
