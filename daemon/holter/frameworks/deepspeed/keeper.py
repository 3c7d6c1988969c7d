"""Saves what `engine.save_checkpoint` writes, or through accelerate, what `accelerator.save_state` makes of it.

    state/  pytorch_model/mp_rank_00_model_states.pt                      ZeRO-3: zero_pp_rank_<rank>_mp_rank_00_model_states.pt
            pytorch_model/zero_pp_rank_<rank>_mp_rank_00_optim_states.pt  latest  random_states_<rank>.pkl …

It is called inside `engine.step`, before ZeRO's step has done anything: steps, samples, loss scale and scheduler are
those of the last completed step. Each rank's random states, and its own buffers, are beside it, for `holter.restore`.

While ranks are blocked, each rank writes its own files with the same function, which then meets nobody
(`no_collectives`). The parts of it that would gather or free ZeRO-3's parameters are left out, because the main thread
may be using them. The partitions hold all that is needed, and a parameter that is gathered at that moment is written as
the placeholder that it is between steps. All ranks must be able to save, because each partition exists on one rank
only.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from holter.errors import SaveError
from holter.frameworks.loop import named_state
from holter.frameworks.saving import random_states
from holter.frameworks.saving.no_collectives import no_collectives
from holter.rank.framework import Keeper, Task
from holter.rank.models import Model


class DeepSpeedKeeper:
    """Saves with an engine's own `save_checkpoint`."""

    framework = "deepspeed"
    rescues_alone = False

    def __init__(self, engine: Any, around: Keeper | None, models: Sequence[Model]) -> None:
        self._engine = engine
        self._models = models
        self._around = around
        """accelerate's keeper, if the engine belongs to an Accelerator; else None."""
        if around is not None:
            around.rescues_alone = False

    def save(self, task: Task) -> None:
        """Write `state/`; every rank writes its own partition."""
        if task.is_rescue:
            with no_collectives(), _left_in_place(self._engine):
                self._save(task)
        else:
            self._save(task)

    def _save(self, task: Task) -> None:
        if self._around is not None:
            self._around.save(task)
        else:
            self._engine.save_checkpoint(str(task.state))
            random_states.write(task, named_state.own_buffers(self._models))

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield master weights and optimizer state of this rank's partition, and what this rank's file has of the module."""
        engine = self._engine
        zero = engine.optimizer
        for number, part in enumerate(_master_weights(zero)):
            yield f"master weights of group {number}", part.detach()
        inner = getattr(zero, "optimizer", zero)
        for number, state in enumerate(inner.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer: {number}.{key}", value.detach()
        if engine.save_non_zero_checkpoint:
            yield from _module_tensors(engine.module)

    def used(self, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of a live tensor that belong to parameters.

        ZeRO-3 pads the last rank's part of each parameter with whatever was in that memory.
        """
        number = re.match(r"(?:master weights of group |optimizer: )(\d+)", name)
        groups = getattr(self._engine.optimizer, "fp16_groups", ())
        group = groups[int(number[1])] if number and int(number[1]) < len(groups) else ()
        if not group or sum(parameter.ds_tensor.ds_numel for parameter in group) != tensor.numel():
            yield tensor
            return
        start = 0
        for parameter in group:
            size = parameter.ds_tensor.ds_numel
            left = parameter.ds_numel - size * dist.get_rank(parameter.ds_process_group)
            yield tensor.view(-1)[start : start + max(0, min(size, left))]
            start += size


@contextmanager
def _left_in_place(engine: Any) -> Iterator[None]:
    """Prevent a save from partitioning, gathering, and asking whether all ranks make the same call."""
    if engine.zero_nvme_offload_optimizer():
        raise SaveError("ZeRO's optimizer state is on NVMe, and ranks are blocked: it may be on its way there")
    zero = engine.optimizer
    own = {engine: ("_checkpoint_tag_validation", "module_state_dict")}
    own |= {zero: tuple(name for name in _EVENTS if hasattr(zero, name))}
    engine._checkpoint_tag_validation = lambda _tag: None  # noqa: SLF001
    engine.module_state_dict = lambda **_: _placeholders(engine.module)
    for name in own[zero]:
        setattr(zero, name, lambda: None)
    try:
        yield
    finally:
        for holder, names in own.items():
            for name in names:
                delattr(holder, name)


_EVENTS = ("checkpoint_event_prologue", "checkpoint_event_epilogue")
"""Methods of ZeRO-3 that partition all parameters before a save, and gather small ones after it."""


def _placeholders(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state_dict as it is between steps, when ZeRO-3 has partitioned its parameters."""
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if hasattr(value, "ds_tensor"):
            state[name] = torch.empty(0, dtype=value.dtype, device=value.device)
        elif isinstance(value, torch.Tensor):
            state[name] = value.detach()
    return state


def _master_weights(zero: Any) -> Sequence[torch.Tensor]:
    """Return this rank's part without the padding that makes all parts equal, which DeepSpeed's files do not contain."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        parts: Sequence[torch.Tensor] = zero.fp32_partitioned_groups_flat
    elif hasattr(zero, "single_partition_of_fp32_groups"):
        parts = zero._get_groups_without_padding(zero.single_partition_of_fp32_groups)  # noqa: SLF001
    else:
        parts = ()
    return parts


def _module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the state_dict.

    For a parameter that ZeRO-3 partitioned, it has a placeholder, and this rank's part if the parameter is frozen.
    """
    for name, value in module.state_dict(keep_vars=True).items():
        part = getattr(value, "ds_tensor", None)
        if part is None:
            yield f"model: {name}", value.detach()
        elif not value.requires_grad:
            yield f"model: {name}, this rank's part", part.detach()
