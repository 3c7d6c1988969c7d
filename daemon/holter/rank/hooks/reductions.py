"""Gradients that the script reduces itself: their parameters are replicas, and here they are read before any clipping.

    for p in model.parameters():
        dist.all_reduce(p.grad)          <- seen here; `p.grad.data` is the same memory

Only reductions over all ranks count. A parameter whose gradient is never reduced is the rank's own, and nobody compares it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from holter.rank.context import Context
from holter.rank.models import Model
from holter.rank.placement import spans_world


class ReplicationProbe:
    """Follows `all_reduce`; calls back when all gradients that the script is known to reduce have been."""

    def __init__(self, context: Context, on_reduced: Callable[[list[torch.Tensor]], None]) -> None:
        self._context = context
        self._on_reduced = on_reduced
        self._candidates: dict[torch.Size, list[tuple[str, torch.Tensor, Model]]] = {}
        """By shape: parameters whose gradients nobody else reduces."""
        self._state: tuple[int, int] | None = None
        """Of the models, when these were looked for."""
        self._known: dict[int, torch.Tensor] = {}
        self._step = -1
        self._seen: dict[int, torch.Tensor] = {}
        """Parameters whose gradients were reduced since the step began."""
        self._is_waited_for = True
        context.models.on_forget.append(self._forget)

    def install(self) -> None:
        """Replace `all_reduce` by ours, which calls it."""
        if not dist.is_available():
            return
        patches, c10d = self._context.patches, dist.distributed_c10d
        patches.replace("all_reduce", self._around(is_many=False), dist, c10d)
        patches.replace("all_reduce_coalesced", self._around(is_many=True), dist, c10d)

    def _around(self, *, is_many: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        notice = self._context.guard.wrap(self._notice)

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def all_reduce(*args: Any, **kwargs: Any) -> Any:
                work = original(*args, **kwargs)
                if not torch.compiler.is_compiling():
                    given = args[0] if args else kwargs.get("tensors" if is_many else "tensor")
                    group = args[2] if len(args) > 2 else kwargs.get("group")  # noqa: PLR2004
                    notice(given if is_many else (given,), group, work)
                return work

            return all_reduce

        return around

    def _notice(self, tensors: Any, group: Any, work: Any) -> None:
        models = self._context.models
        # Another thread's gradients are not to be looked at; a model that is alone is this thread's.
        ours = models.active() or (list(models) if len(list(models)) == 1 else [])
        if self._state != (models.generation, len(ours)):
            self._learn_candidates(ours)
        if not self._candidates or not spans_world(group):
            return
        if self._step != self._context.log.step:
            self._step, self._seen, self._is_waited_for = self._context.log.step, {}, True
        for tensor in tensors:
            owner = self._owner(tensor)
            if owner is not None:
                self._learn(*owner, is_waited_for=work is None)

    def _learn(self, name: str, parameter: torch.Tensor, model: Model, *, is_waited_for: bool) -> None:
        is_new = id(parameter) not in self._known
        self._known[id(parameter)] = self._seen[id(parameter)] = parameter
        self._is_waited_for &= is_waited_for
        if is_new:
            model.learn_reduced(name, parameter)
            self._context.models.generation += 1
            self._state = (self._context.models.generation, self._state[1] if self._state else 0)
            if is_waited_for:
                self._on_reduced([parameter])
        elif self._is_waited_for and self._seen.keys() == self._known.keys():
            self._on_reduced(list(self._known.values()))

    def _owner(self, tensor: Any) -> tuple[str, torch.Tensor, Model] | None:
        alike = self._candidates.get(tensor.shape) if isinstance(tensor, torch.Tensor) else None
        if alike is None:
            return None
        address = tensor.data_ptr()
        for candidate in alike:
            gradient = candidate[1].grad
            if gradient is not None and gradient.data_ptr() == address:
                return candidate
        return None

    def _forget(self) -> None:
        """The script let go of a model: its memory is not ours to hold."""
        self._candidates, self._known, self._seen, self._state = {}, {}, {}, None

    def _learn_candidates(self, models: Sequence[Model]) -> None:
        self._state = (self._context.models.generation, len(models))
        self._candidates = {}
        living = set()
        for model in models:
            for name, p in model.parameters:
                if p.requires_grad and (id(p) not in model.replicas or name in model.reduced_by_hand):
                    self._candidates.setdefault(p.shape, []).append((name, p, model))
                    living.add(id(p))
        self._known = {key: p for key, p in self._known.items() if key in living}
