"""What holter knows of DeepSpeed in particular, above all ZeRO's step, which surrounds the steps of its inner optimizer.

    engine.step()
        zero.step()                       <- the step begins: nothing is applied, and all gradients exist, reduced and partitioned
            optimizer.step()  group 0     <- too late to hold, and one of several
            optimizer.step()  group 1 …

So ZeRO's step counts as the optimizer's step, and the steps inside it are ignored. Before it, its gradients are not yet
where the inner optimizer will find them; they are lent to those who read what is applied. In fp16 ZeRO looks for
overflows itself and skips such steps, which is no fault; DeepSpeed counts a skipped step, and so does holter.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holter.frameworks.accelerate.framework import Accelerate
from holter.rank.framework import Framework, Keeper, LateImports, LibraryFunction, SaveFunction, absolute

if TYPE_CHECKING:
    import torch

    from holter.rank.context import Context
    from holter.rank.hooks.step import StepProbe
    from holter.rank.monitor import Monitor

_ENGINE = ("deepspeed.runtime.engine", "DeepSpeedEngine")


def _where(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> str:
    """Return the path of `save_checkpoint(save_dir, tag)`; without a tag, DeepSpeed uses the step."""
    engine, *rest = args
    save_dir = kwargs["save_dir"] if "save_dir" in kwargs else rest.pop(0)
    tag = kwargs.get("tag", rest[0] if rest else None)
    return absolute(os.path.join(save_dir, str(tag or f"global_step{engine.global_steps}")))  # noqa: PTH118 - may be an address


class DeepSpeed(Framework):
    """A script with an engine, its own or one inside an Accelerator."""

    name = checkpoint = "deepspeed"
    resume = "engine.load_checkpoint({path!r})"
    module, owner = _ENGINE
    saves = (
        SaveFunction(*_ENGINE, "save_checkpoint", checkpoint="deepspeed", where=_where),
        SaveFunction(*_ENGINE, "save_16bit_model"),
    )

    def attach(self, monitor: "Monitor") -> None:
        """Follow ZeRO's step, which surrounds the optimizer's."""
        monitor.before_backward.append(monitor.context.guard.wrap(ZeroProbe(monitor.context, monitor.steps).look))

    def count_steps(self, optimizer: Any) -> int | None:
        """Return the engine's completed steps, including skipped ones; None if no engine has this optimizer."""
        return next((int(engine.global_steps) for engine in self.owners([optimizer])), None)

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper | None:
        """Return a keeper that saves with `save_checkpoint`, or through the Accelerator around the engine; None without an engine."""
        for engine in self.owners(optimizers):
            from holter.frameworks.deepspeed.keeper import DeepSpeedKeeper  # noqa: PLC0415  imports torch

            return DeepSpeedKeeper(engine, Accelerate().keeper(context, optimizers), context.models.active())
        return None


STEPS = (
    LibraryFunction("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "step"),
    LibraryFunction("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "step"),
)
"""Step functions of DeepSpeed's optimizers that partition what they apply."""


class ZeroProbe:
    """Follows ZeRO's optimizers, once the script has imported DeepSpeed."""

    def __init__(self, context: "Context", steps: "StepProbe") -> None:
        self._context = context
        self._steps = steps
        self._awaited = LateImports(STEPS)
        self._open: list[torch.optim.Optimizer] = []

    def look(self) -> None:
        """Follow what was imported since the last look."""
        for found, owners in self._awaited.come():
            self._context.patches.replace(found.name, self._around, *owners)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        wrap = self._context.guard.wrap
        begin, end = wrap(self._begin, "claims"), wrap(self._end)

        @functools.wraps(original)
        def step(zero: Any, *args: Any, **kwargs: Any) -> Any:
            begin(zero)
            try:
                return original(zero, *args, **kwargs)
            finally:
                end(zero)

        return step

    def _begin(self, zero: Any) -> None:
        from holter.rank.mesh import partitions  # noqa: PLC0415  imports torch

        inner = zero.optimizer
        names = {id(p): name for model in self._context.models for name, p in model.parameters}
        found = list(_gradients(zero, names))
        ours = {id(parameter) for (_, parameter), _ in found}
        for model in self._context.models:
            model.is_active |= any(id(p) in ours for _, p in model.parameters)
        skips = _skips_overflows(zero)
        self._context.frameworks.lent[inner] = [] if skips else found
        (self._context.frameworks.partitioned.discard if skips else self._context.frameworks.partitioned.add)(inner)
        self._context.frameworks.partitions[inner] = partitions(zero)
        self._context.frameworks.trains[inner] = frozenset(
            id(p) for group in _groups(zero) for p in group if p.requires_grad
        )
        self._open.append(inner)
        self._steps.begin(inner)

    def _end(self, zero: Any) -> None:
        if not self._open:
            return
        inner, context = self._open.pop(), self._context
        context.frameworks.lent.pop(inner, None)
        if getattr(zero, "overflow", False) and _skips_overflows(zero):
            # ZeRO has thrown the gradients away, as a loss scaler does. Without a scale to blame it drops them too, but there they are a fault.
            context.log.now.acquit(is_skipped=True)
            context.inputs.suspect = None
        self._steps.end(inner)


def _groups(zero: Any) -> Any:
    """Return the model's parameters that a ZeRO optimizer makes from its partitions, group by group."""
    return getattr(zero, "bit16_groups", None) or getattr(zero, "fp16_groups", None) or ()


def _skips_overflows(zero: Any) -> bool:
    """Return whether it looks for a loss scale, so that a step with overflows is no fault."""
    half = sys.modules["torch"].float16
    return getattr(zero, "dtype", None) is half or bool(getattr(zero, "torch_autocast_gradscaler", None))


def _is_copied(zero: Any, gradient: "torch.Tensor") -> bool:
    """Whether this gradient is complete, so that no copy from a device into it can be in progress; otherwise it is not read.

    ZeRO-Offload copies on streams of its own and waits for them in its step. Nobody waits here: each stream is asked
    whether it has work left.
    """
    if not gradient.is_cpu:
        return True
    from holter.rank import accelerator  # noqa: PLC0415  imports torch

    return all(stream.query() for stream in accelerator.streams_of(zero))


def _gradients(zero: Any, names: dict[int, str]) -> "Iterator[tuple[tuple[str, Any], torch.Tensor]]":
    """Yield this rank's part of every reduced gradient, with the parameter's name."""
    flats: Any = getattr(zero, "fp32_partitioned_groups_flat", ()) or getattr(
        zero, "single_partition_of_fp32_groups", ()
    )
    groups: Any = getattr(zero, "params_in_partition", ()) or getattr(zero, "fp16_groups", ())
    averaged = getattr(zero, "averaged_gradients", {})
    for number, flat in enumerate(flats):
        parts = averaged.get(number)
        if parts is None:
            # Offloaded: it is where the inner optimizer will find it.
            if flat.grad is not None and _is_copied(zero, flat.grad):
                yield (f"partition {number}", flat), flat.grad
            continue
        owners = iter(groups[number] if number < len(groups) else ())
        for part in parts:
            owner = None if getattr(part, "_zero_padding", False) else next(owners, None)
            if part is not None:
                yield (names.get(id(owner), f"partition {number}"), part if owner is None else owner), part
