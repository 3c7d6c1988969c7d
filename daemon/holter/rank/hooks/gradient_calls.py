"""Follows what the script itself calls on its gradients: clipping by the norm, and reductions.

A clipping call tells the norm and its limit. A parameter whose gradient the script reduces is a replica, and the gradient is read before any
clipping:

    for p in model.parameters():
        dist.all_reduce(p.grad)          <- seen here; `p.grad.data` is the same memory

Only reductions over all ranks count. A parameter whose gradient is never reduced is the rank's own, and nobody compares it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from holter.rank.context import Context
from holter.rank.models import Model, gradients_of, is_split, spans_world
from holter.rank.publish.step_log import OpenStep
from holter.rank.readings.gradient_answers import are_plain
from holter.rank.readings.samples import local


class ClipProbe:
    """Follows `torch.nn.utils.clip_grad_norm_`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def install(self) -> None:
        """Patch torch's functions that clip by the norm."""
        owners = torch.nn.utils, torch.nn.utils.clip_grad
        self._context.patches.replace("clip_grad_norm_", self._around_clip, *owners)
        # This runs between the norm and the scaling by it, after which every shard has the NaN of one.
        self._context.patches.replace("_clip_grads_with_norm_", self._around_scaling, torch.nn.utils.clip_grad)
        self._context.patches.replace("clip_grads_with_norm_", self._around_scaling, torch.nn.utils)

    def _around_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        learn = self._context.guard.wrap(self._clipped)

        @functools.wraps(original)
        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(parameters, max_norm, *args, **kwargs)
            if not isinstance(parameters, (torch.Tensor, list, tuple)):
                # A generator can be read only once, and torch has to read it too.
                parameters = list(parameters)
            norm = original(parameters, max_norm, *args, **kwargs)
            learn(parameters, max_norm, norm, args[0] if args else kwargs.get("norm_type", 2.0))
            return norm

        return clip_grad_norm_

    def _around_scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        look = self._context.guard.wrap(self._look_before_scaling)

        @functools.wraps(original)
        def scale(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and isinstance(parameters, (torch.Tensor, list, tuple)):
                look(parameters, total_norm)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return scale

    def _look_before_scaling(self, parameters: Any, norm: Any) -> None:
        """Note whether this rank's shards are finite before the scaling spreads a NaN to all ranks.

        This is read only if the norm is not finite, and never from a device, for which we would have to wait.
        """
        if not isinstance(norm, torch.Tensor) or not local(norm).is_cpu or math.isfinite(float(local(norm))):
            return
        held = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        gradients = [p.grad for p in held if p.grad is not None]
        if not any(is_split(gradient) for gradient in gradients):
            return
        is_finite = all(bool(torch.isfinite(local(gradient)).all()) for gradient in gradients)
        reading = self._context.log.now.gradients
        reading.was_clipped_finite = is_finite and reading.was_clipped_finite is not False

    def _clipped(self, parameters: Any, limit: Any, norm: Any, kind: Any) -> None:
        if not isinstance(norm, torch.Tensor) or isinstance(limit, torch.Tensor):
            return
        if any(not placement.is_replicate() for placement in getattr(norm, "placements", ())):
            # The whole norm is known only after a reduction, which only the script may start.
            return
        held = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        step, here = self._context.log.now, local(norm)
        # The norm of flat shards covers only this rank's own.
        is_sharded = self._context.models.has_flat({id(p) for p in held[:1]})
        if here.is_cpu:
            found = float(here)
            _note(step, found, float(limit), is_sharded=is_sharded)
            # The norm of order 0 counts elements, NaN among them.
            if math.isfinite(found) and float(kind) > 0:
                given = gradients_of(held)
                dense = given if are_plain(given) else [g for g in given if g is not None and not g.is_sparse]
                self._context.hold.known_finite.note(dense)
            return

        def learn(table: Any) -> None:
            odd = math.nan if table.nans[0] + table.pos_infs[0] else 0.0
            _note(step, float(table.sum[0]) + odd, float(limit), is_sharded=is_sharded)

        self._context.read(f"clip{id(held[0]) if held else 0}", [here], learn, step=step)


def _note(step: OpenStep, norm: float, limit: float, *, is_sharded: bool) -> None:
    """Note the norm and limit of a clipping call; of several in one step, those of the one that clips hardest are kept."""
    numbers = step.numbers
    if not math.isfinite(norm):
        return
    if "clip.norm" in numbers and not norm * numbers["clip.limit"] > numbers["clip.norm"] * limit:
        return
    numbers.update({"clip.norm": norm, "clip.limit": limit, "clip.is_sharded": float(is_sharded)})


class ReplicationProbe:
    """Follows `all_reduce`; calls back when all gradients that the script is known to reduce have been reduced."""

    def __init__(self, context: Context, on_reduced: Callable[[list[torch.Tensor]], None]) -> None:
        self._context = context
        self._on_reduced = on_reduced
        self._candidates: dict[torch.Size, list[tuple[str, torch.Tensor, Model]]] = {}
        """Shape -> (name, parameter, model) of the parameters whose gradients nobody but the script reduces."""
        self._state: tuple[int, int] | None = None
        """Generation and number of the models when the candidates were collected; None if they have to be collected again."""
        self._known: dict[int, torch.Tensor] = {}
        self._step = -1
        self._seen: dict[int, torch.Tensor] = {}
        """Parameters by id whose gradients were reduced since the step began."""
        self._is_waited_for = True
        context.models.on_forget.append(self._forget)

    def install(self) -> None:
        """Patch `all_reduce` and `all_reduce_coalesced`."""
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
        # Another thread's gradients must not be looked at; a model that is the only one is this thread's.
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
        """Drop all references to parameters, because the script has let go of a model and its memory must be freed."""
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
