"""DeepSpeed: what `engine.save_checkpoint` writes; through accelerate, what `accelerator.save_state` makes of it.

    state/  pytorch_model/mp_rank_00_model_states.pt                      ZeRO-3: zero_pp_rank_<rank>_mp_rank_00_model_states.pt
            pytorch_model/zero_pp_rank_<rank>_mp_rank_00_optim_states.pt  latest  random_states_<rank>.pkl …

Called inside `engine.step`, before anything of ZeRO's step is done: steps, samples, loss scale and scheduler are those of the last
completed step. Without accelerate each rank's random states are written beside it, for `holter.restore`.

While ranks are blocked nothing can be saved: DeepSpeed saves by collectives, and each rank has a part that no other has.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from holter.errors import SaveError
from holter.frameworks.saving import random_states
from holter.rank.framework import Keeper, Task


class DeepSpeedKeeper:
    """Saves by an engine's own `save_checkpoint`."""

    framework = "deepspeed"
    rescues_alone = False

    def __init__(self, engine: Any, around: Keeper | None) -> None:
        self._engine = engine
        self._around = around
        """accelerate's keeper, if the engine is accelerate's."""

    def save(self, task: Task) -> None:
        """Write `state/`; every rank writes its own partition."""
        if task.is_rescue:
            raise SaveError("DeepSpeed saves by collectives, and ranks are blocked: ZeRO's partitions are not saved")
        if self._around is not None:
            self._around.save(task)
        else:
            self._engine.save_checkpoint(str(task.state))
            random_states.write(task, {})

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Master weights and optimizer state of this rank's partition, and of the module what this rank's file has of it."""
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


def _master_weights(zero: Any) -> Sequence[torch.Tensor]:
    """This rank's part, without the padding that makes all parts equal: DeepSpeed leaves it out of its files."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        parts: Sequence[torch.Tensor] = zero.fp32_partitioned_groups_flat
    elif hasattr(zero, "single_partition_of_fp32_groups"):
        parts = zero._get_groups_without_padding(zero.single_partition_of_fp32_groups)  # noqa: SLF001
    else:
        parts = ()
    return parts


def _module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a state_dict has. Of a parameter that ZeRO-3 partitioned it has a placeholder, and this rank's part if it is frozen."""
    for name, value in module.state_dict(keep_vars=True).items():
        part = getattr(value, "ds_tensor", None)
        if part is None:
            yield f"model: {name}", value.detach()
        elif not value.requires_grad:
            yield f"model: {name}, this rank's part", part.detach()
