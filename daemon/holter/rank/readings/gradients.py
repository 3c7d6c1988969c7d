"""Gradients, read at every step.

The rank's own gradients are read at the end of backward, before any reduction. Where those cannot be seen, or something is suspected, the
gradients that the optimizer is given are read.
"""

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from holter.rank.context import Context
from holter.rank.models import Model, gradient_view, gradients_of, held_by
from holter.rank.publish.step_log import OpenStep
from holter.rank.readings.fused_pass import TableOutline, outline
from holter.rank.readings.gradient_answers import GradientMark, are_plain
from holter.records import Nonfinite, Where

_parameter = operator.itemgetter(1)

NamedGradients = tuple[Sequence[tuple[str, Any]], Sequence[torch.Tensor]]
"""Parameters with their names, and the gradient of each."""


class TensorShare(NamedTuple):
    """The tensors that one step reads: every `stride`-th, beginning with `number`."""

    stride: int
    number: int


ALL = TensorShare(1, 0)


class _AskedGradients:
    """The parameters and gradients that a reading covers.

    A device may answer much later; until then neither gradients nor parameters are held, because they are the script's memory.
    """

    def __init__(self, named: Sequence[tuple[str, Any]], gradients: Sequence[torch.Tensor]) -> None:
        self._named = named
        self.gradients = gradients
        """The gradients; empty once they were let go."""
        self.is_answered = False
        self._left: list[tuple[str, weakref.ref[Any], int]] = []
        """What is kept of each gradient after that: name, weak reference to the parameter, and number of elements."""

    def let_go(self, *, is_owed: bool) -> None:
        """Let go of gradients and parameters once the reading has begun; names and weak references are kept if its answer is owed."""
        if is_owed:
            pairs = zip(self._named, self.gradients, strict=True)
            self._left = [(name, weakref.ref(p), gradient.numel()) for (name, p), gradient in pairs]
        self._named = self.gradients = ()

    def named(self) -> Sequence[tuple[str, Any]]:
        """Return names and parameters; the parameter is None if the script has freed it."""
        return self._named or [(name, parameter()) for name, parameter, _ in self._left]

    def row(self, row: int) -> tuple[str, Any, int]:
        """Return the name, parameter (None if freed) and number of elements of one row of the answer."""
        if self._named:
            return *self._named[row], self.gradients[row].numel()
        name, parameter, numel = self._left[row]
        return name, parameter(), numel


class GradientProbe:
    """Looks for gradients that are not finite, and takes their norm."""

    def __init__(
        self,
        context: Context,
        on_read: Callable[[Callable[[], Sequence[tuple[str, Any]]], Any, TableOutline], None] | None = None,
    ) -> None:
        self._context = context
        self._on_read = on_read
        self.ready_order: dict[int, int] = {}
        """Place of each parameter, by its id, in the order in which gradients became ready in the first backward pass."""
        self._order_hooks: list[Any] = []
        self._looked = -1, 0, 0
        """The step and the optimizer's id of the last reading of applied gradients, and the number of backward passes before it."""
        self._square_sums: dict[str, dict[TensorShare, float]] = {}
        """Sum of squares of each share as it was last read, by the model's prefix."""

    def follow_order(self) -> None:
        """Learn, during one backward pass, in which order it reaches the parameters."""
        if self.ready_order or self._order_hooks:
            return
        learn = self._context.guard.wrap(lambda p: self.ready_order.setdefault(id(p), len(self.ready_order)), "any")
        self._order_hooks = [
            p.register_post_accumulate_grad_hook(learn)
            for model in self._context.models.active()
            for _, p in model.parameters
            if p.requires_grad
        ]

    def unfollow_order(self) -> None:
        """Remove the hooks of `follow_order` after the backward pass, even if it raised."""
        for hook in self._order_hooks:
            hook.remove()
        self._order_hooks.clear()

    def read_local(self) -> None:
        """Read the rank's own gradients, where the framework still shows them."""
        context = self._context
        step = context.log.now
        reading_s = context.reading_s
        # Micro-steps add up in .grad, so the last reading of a step covers them all.
        step.gradients.square_sums.clear()
        stride = context.schedule.plan.gradient_stride
        share = TensorShare(stride, step.step % stride)
        step.gradients.is_local_whole = stride == 1
        for model in context.models.active():
            if model.shows_local_gradients():
                part = slice(share.number, None, stride)
                found = (
                    _with_gradients(model.parameters, model.tensors)
                    if stride == 1
                    else _with_gradients(model.parameters[part], model.tensors[part])
                )
                is_read = self._read(model, step, found, "gradient", share, 0)
                step.gradients.is_local_read |= is_read
                step.gradients.is_local_whole &= is_read
            else:
                step.gradients.is_local_whole = False
        step.cost.gradients_s += context.reading_s - reading_s

    def read_applied(self, optimizer: torch.optim.Optimizer, *, is_known_bad: bool = False) -> None:
        """Read the gradients that the optimizer applies, if something is suspected or nothing was seen before the reduction."""
        step = self._context.log.now
        # An answer that a device still owes may turn out to name a suspect.
        if step.gradients.is_local_read and not step.suspects.tensors and not step.num_owed and not is_known_bad:
            return
        if getattr(optimizer, "found_inf", None) is not None:
            # A fused optimizer skips the step itself if the scaler found something.
            step.acquit(is_skipped=True)
            return
        looked = step.step, id(optimizer), self._context.log.num_backwards
        is_again, self._looked = looked == self._looked and not is_known_bad, looked
        lent = self._context.frameworks.lent.get(optimizer)
        held = held_by([optimizer])
        for model in self._context.models.active()[: None if lent is None else 1]:
            if lent is None:
                found = _with_gradients([named for named in model.parameters if id(named[1]) in held])
            else:
                found = [named for named, _ in lent], [gradient for _, gradient in lent]
            # Gradients for which nobody can tell whether they have changed are not read twice, before the step and after it.
            if not is_again or GradientMark.of(found[1]) is not None:
                self._read(model, step, found, "reduced_gradient", ALL, id(optimizer))
        if step.suspects.tensors and not step.suspects.is_applied and not step.num_owed:
            step.acquit()
            self._context.inputs.suspect = None

    def _read(  # noqa: PLR0913, PLR0917 - a reading, named
        self, model: Model, step: OpenStep, found: NamedGradients, where: Where, share: TensorShare, optimizer: int
    ) -> bool:
        """Read these gradients and note those that are not finite as suspects; return False if they cannot be read."""
        if not found[1]:
            return True
        asked = _AskedGradients(*found)
        is_alone = self._context.world_size == 1
        counts = where == "gradient" or not step.gradients.is_local_read
        if counts and where == "reduced_gradient":
            step.gradients.view = gradient_view([model])

        def learn(table: Any) -> None:
            asked.is_answered = True
            seen = outline(table)
            if self._on_read is not None and step is self._context.log.now:
                self._on_read(asked.named, table, seen)
            rows: Sequence[int] = np.flatnonzero(_bad(table)).tolist() if seen.has_nonfinite else ()
            if not rows and share.stride > 1 and is_alone and asked.gradients:
                self._context.hold.known_finite.note(asked.gradients)
            if counts:
                # The table's sum leaves out what is not finite.
                of_all = self._sum_of_shares(model, share, math.nan if rows else seen.square_sum)
                if of_all is not None:
                    step.gradients.square_sums[model.prefix, optimizer] = of_all
            for row in rows:
                name, parameter, numel = asked.row(row)
                step.suspects.is_applied |= where == "reduced_gradient"
                step.suspects.add(
                    Nonfinite(
                        where=where,
                        name=name,
                        nans=int(table.nans[row]),
                        infs=int(_bad(table)[row] - table.nans[row]),
                        numel=numel,
                        order=self.ready_order.get(id(parameter), 0),
                        is_from_clip=where == "reduced_gradient" and bool(step.gradients.was_clipped_finite),
                    )
                )

        name = f"{where}{model.prefix}{share.number}"
        if where == "gradient" and not is_alone:
            # The reduction will change these gradients, so nobody else will ask for them as they are now.
            is_read = self._context.read(name, found[1], learn, step=step) is not None
        else:
            answers = self._context.gradient_answers
            is_read = answers.read(self._context, name, found[1], learn, step=step) is not None
        asked.let_go(is_owed=is_read and not asked.is_answered)
        return is_read

    def _sum_of_shares(self, model: Model, share: TensorShare, square_sum: float) -> float | None:
        """Return the sum of squares of all shares, each as last read; None until every share was read once."""
        sums = self._square_sums.setdefault(model.prefix, {})
        if sums and next(iter(sums)).stride != share.stride:
            sums.clear()
        sums[share] = square_sum
        return sum(sums.values()) if len(sums) == share.stride else None


def _bad(table: Any) -> Any:
    return table.nans + table.pos_infs + table.neg_infs


def _with_gradients(named: Sequence[tuple[str, Any]], owners: list[Any] | None = None) -> NamedGradients:
    """Return the parameters that have a dense gradient, with the gradients; `owners` are the same parameters without names, if at hand."""
    gradients = gradients_of(map(_parameter, named) if owners is None else owners)
    if not are_plain(gradients):
        found = [(each, g) for each, g in zip(named, gradients, strict=True) if g is not None and not g.is_sparse]
        return [each for each, _ in found], [g for _, g in found]
    return named, gradients
