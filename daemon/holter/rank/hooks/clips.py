"""Clipping by the norm: what the norm was, and its limit, as the script's own call found them."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from holter.rank.context import Context
from holter.rank.placement import is_split
from holter.rank.publish.step_log import OpenStep
from holter.rank.readings.samples import local

FLAT = "FullyShardedDataParallel"


class ClipProbe:
    """Follows `torch.nn.utils.clip_grad_norm_`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def install(self) -> None:
        """Call through ours."""
        owners = torch.nn.utils, torch.nn.utils.clip_grad
        self._context.patches.replace("clip_grad_norm_", self._around_clip, *owners)
        # Between the norm and the scaling by it: afterwards every shard has the NaN of one.
        self._context.patches.replace("_clip_grads_with_norm_", self._around_scaling, torch.nn.utils.clip_grad)
        self._context.patches.replace("clip_grads_with_norm_", self._around_scaling, torch.nn.utils)

    def _around_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        learn = self._context.guard.wrap(self._clipped)

        @functools.wraps(original)
        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(parameters, max_norm, *args, **kwargs)
            if not isinstance(parameters, (torch.Tensor, list, tuple)):
                # A generator can be read once, and torch is to read it too.
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
        """Whose shard had the NaN before the scaling gives it to all; asked only if the norm is not finite, and never of a device, which we would have to wait for."""
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
            # The whole norm is known after a reduction only, and that is the script's to ask for.
            return
        held = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        step, here, is_sharded = self._context.log.now, local(norm), self._is_sharded(held)
        if here.is_cpu:
            found = float(here)
            _note(step, found, float(limit), is_sharded=is_sharded)
            # The norm of order 0 counts elements, NaN among them.
            if math.isfinite(found) and float(kind) > 0:
                self._context.hold.known_finite.note(held)
            return

        def learn(table: Any) -> None:
            odd = math.nan if table.nans[0] + table.pos_infs[0] else 0.0
            _note(step, float(table.sum[0]) + odd, float(limit), is_sharded=is_sharded)

        self._context.readings.read(f"clip{id(held[0]) if held else 0}", [here], step.owe(learn))

    def _is_sharded(self, held: Any) -> bool:
        """Whether these are the flat shards of FSDP's first kind: their norm is the shard's own."""
        clipped = {id(p) for p in held[:1]}
        return any(
            model.wrapper == FLAT and any(id(p) in clipped for _, p in model.parameters)
            for model in self._context.models
        )


def _note(step: OpenStep, norm: float, limit: float, *, is_sharded: bool) -> None:
    """Of several calls in one step, the one that clips hardest."""
    numbers = step.numbers
    if not math.isfinite(norm):
        return
    if "clip.norm" in numbers and not norm * numbers["clip.limit"] > numbers["clip.norm"] * limit:
        return
    numbers.update({"clip.norm": norm, "clip.limit": limit, "clip.is_sharded": float(is_sharded)})
