"""By how much the gradients of each parameter are divided: one model has one scale, whatever axes its parameters lie on.

    fully_shard        summed over its mesh, divided by as many ranks, or by what `set_gradient_divide_factor` says
    DDP                summed over its group and divided by its size
    experts            tokens of all ranks come to them by `all_to_all`, so that their gradients hold the losses of all ranks; nobody
                       divides what DDP was told to ignore, unless the script does: measured between the backward pass and the optimizer
    summed by hand     a gradient that was the same on every rank before the script's `all_reduce` added it up: measured before it and at the optimizer

It is reported once, after the first steps. What a comm hook, a parameter's own hook or another framework does is not known, and is not reported.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from holter.rank.context import Context
from holter.rank.models import Model, fsdp_groups, num_replicas, spans_world
from holter.records import GradientScales, Named, ScaleGroup

FIRST_STEP, LAST_STEP = 3, 12
"""First and last step at which the divisors are measured, unless they are known earlier."""
MAX_NAMES = 16
SAME = 1e-3
SCALE_FREE = ("adam", "lamb", "lion", "adagrad", "rmsprop", "adafactor", "muon", "rprop", "shampoo", "soap")
"""Parts of the names of optimizers that divide a gradient by its own size."""
MEASURED = "experts: measured"
SUMMED = "equal on all ranks before the script summed them"
Held = dict[int, tuple[str, Any]]


class GradientScaleProbe:
    """Finds out by which number the gradients of each parameter are divided."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.is_told = context.world_size == 1
        """Whether the scales were reported; nothing is looked at after that."""
        self._has_exchange = False
        self._experts: tuple[int, Held, float] = (-1, {}, 0.0)
        """A step, the experts that nothing reduces, and the norm of their gradients when that step's backward pass was over."""
        self._summed: dict[int, tuple[str, Any, float]] = {}
        """Gradients that the script sums in the current step, by the parameter's id: name, parameter, norm before the sum."""
        self._step = -1

    def install(self) -> None:
        """Wrap the collectives that move tokens between ranks, and those that sum over ranks."""
        if dist.is_available():
            for name in ("all_to_all_single", "all_to_all"):
                self._context.patches.replace(name, self._around_exchange, dist, dist.distributed_c10d)
            self._context.patches.replace("all_reduce", self._around_sum, dist, dist.distributed_c10d)

    @property
    def _is_looking(self) -> bool:
        return not self.is_told and FIRST_STEP <= self._context.log.step <= LAST_STEP

    def _around_exchange(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def exchange(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._has_exchange = True
            return original(*args, **kwargs)

        return exchange

    def _around_sum(self, original: Callable[..., Any]) -> Callable[..., Any]:
        look = self._context.guard.wrap(self._before_sum)

        @functools.wraps(original)
        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            if self._is_looking and not torch.compiler.is_compiling():
                look(*args, **kwargs)
            return original(*args, **kwargs)

        return all_reduce

    def _before_sum(self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, *_: Any, **__: Any) -> None:
        """Note the norm of a tensor that is about to be summed over all ranks, if it is a gradient."""
        if op != dist.ReduceOp.SUM or not spans_world(group) or type(tensor) is not torch.Tensor:
            return
        if self._step != self._context.log.step:
            self._step, self._summed = self._context.log.step, {}
        found = next((named for named in _plain(self._context.models.active()) if _is_gradient(named[1], tensor)), None)
        if found is not None:
            name, parameter = found
            self._read([tensor], lambda norm: self._summed.setdefault(id(parameter), (name, parameter, norm)))

    def backward_ended(self) -> None:
        """Note the gradients of experts that nothing reduces, and their norm."""
        if not self._is_looking or not self._has_exchange:
            return
        held = {
            id(p): (name, p)
            for model in self._context.models.active()
            for name, p in _ignored_experts(model)
            if p.grad is not None and not p._backward_hooks and not getattr(p, "_post_accumulate_grad_hooks", None)  # noqa: SLF001
        }
        step = self._context.log.step

        def learn(norm: float) -> None:
            self._experts = step, held, norm

        if held:
            self._read([p.grad for _, p in held.values()], learn)

    def before_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Measure the gradients that an optimizer is about to apply, and report the scales."""
        if not self._is_looking:
            return
        groups = [group for model in self._context.models.active() for group in _declared(model)]
        groups += [*self._measured_experts(), *self._measured_sums()]
        if groups:
            self.is_told = True
            names = [type(optimizer).__name__.lower() for optimizer in optimizers]
            is_free = all(any(word in name for word in SCALE_FREE) for name in names) and self._clip_factor() == 1.0
            if self._context.writer.rank == 0 or any(group.how in (MEASURED, SUMMED) for group in groups):
                told = GradientScales(groups=groups, is_scale_free=is_free)
                self._context.writer.say(self._context.log.step, told)

    def _measured_experts(self) -> Iterator[ScaleGroup]:
        step, held, before = self._experts
        if step != self._context.log.step or not held or not before:
            return
        given = self._norm([p.grad for _, p in held.values() if p.grad is not None])
        if given:
            divisor = before * self._clip_factor() / given
            yield ScaleGroup(
                _named([name for name, _ in held.values()]), _rounded(divisor), self._context.world_size, MEASURED
            )

    def _measured_sums(self) -> Iterator[ScaleGroup]:
        """Yield the gradients that a sum over all ranks made exactly `world_size` times as large: they were the same on every rank."""
        if self._step != self._context.log.step or not self._summed:
            return
        size, clip = self._context.world_size, self._clip_factor()
        again = [
            name
            for name, p, before in self._summed.values()
            if before and p.grad is not None and math.isclose(self._norm([p.grad]), size * before * clip, rel_tol=SAME)
        ]
        others = [
            name for name, p in _plain(self._context.models.active()) if id(p) not in self._summed and p.requires_grad
        ]
        if again and others:
            yield ScaleGroup(_named(again), 1.0, size, SUMMED)
            yield ScaleGroup(_named(others), 1.0, 1, "left as the backward pass made them")

    def _clip_factor(self) -> float:
        numbers = self._context.log.now.numbers
        norm, limit = numbers.get("clip.norm", 0.0), numbers.get("clip.limit", math.inf)
        return min(1.0, limit / (norm + 1e-6))

    def _norm(self, tensors: Sequence[Any]) -> float:
        """Return the norm over all these tensors; 0.0 if a device has not answered."""
        found: list[float] = []
        self._read(tensors, found.append)
        return found[0] if found else 0.0

    def _read(self, tensors: Sequence[Any], then: Callable[[float], Any]) -> None:
        self._context.read(
            "scale",
            tensors,
            lambda table: then(math.sqrt(max(0.0, float(table.square_sum.sum())))),
            step=self._context.log.now,
        )


def _declared(model: Model) -> Iterator[ScaleGroup]:
    """Yield the scales that follow from the settings of FSDP2 and DDP."""
    names = {id(p): name for name, p in model.parameters if p.requires_grad}
    for group in fsdp_groups(model.root):
        held = [name for one in group.fsdp_params if (name := names.get(id(one.sharded_param)))]
        info = group.mesh_info
        sizes = [getattr(info, "replicate_mesh_size", 1), getattr(info, "shard_mesh_size", 1)]
        reduced = math.prod(sizes)
        experts = [name for name in held if "expert" in name.lower() and "shared" not in name.lower()]
        factor = float(group.gradient_divide_factor or reduced)
        num = reduced
        if experts and len(experts) == len(held):
            # Tokens of every rank on the whole model's mesh come to the experts.
            num = max(reduced, len(model.span), _mesh_size(group))
        if held and num > 1:
            yield ScaleGroup(_named(held), factor, num, "fully_shard", [size for size in sizes if size > 1])
    ddp = model.ddp
    if ddp is not None and not getattr(ddp, "_comm_hooks", None):
        size = num_replicas(getattr(ddp, "process_group", None))
        held = [
            name
            for name, p in model.parameters
            if p.requires_grad and id(p) in model.holders and not hasattr(p, "placements")
        ]
        if held:
            yield ScaleGroup(_named(held), float(size), size, "DDP", [size])


def _mesh_size(group: Any) -> int:
    return max((one.sharded_param.device_mesh.size() for one in group.fsdp_params), default=1)


def _ignored_experts(model: Model) -> list[tuple[str, Any]]:
    """Return the experts that neither DDP nor `fully_shard` reduces."""
    return [
        (name, p)
        for name, p in model.parameters
        if p.requires_grad and id(p) not in model.holders and "expert" in name.lower() and model.span
    ]


def _plain(models: Sequence[Model]) -> list[tuple[str, Any]]:
    """Return the parameters on a mesh that are not shards: the script may sum their gradients itself, once or once too often."""
    return [(name, p) for model in models if model.axes for name, p in model.parameters if not hasattr(p, "placements")]


def _is_gradient(parameter: Any, tensor: torch.Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and gradient.shape == tensor.shape and gradient.data_ptr() == tensor.data_ptr()


def _rounded(divisor: float) -> float:
    whole = round(divisor)
    return float(whole) if whole and abs(divisor - whole) <= SAME * whole else divisor


def _named(names: Sequence[str]) -> Named:
    return Named(len(names), list(names[:MAX_NAMES]))
