"""Saves FSDP1: in a held step a checkpoint of torch.distributed.checkpoint; while ranks are blocked, each rank's part."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from holter.frameworks.fsdp import parts
from holter.frameworks.fsdp.framework import PARTS
from holter.frameworks.loop import named_state
from holter.frameworks.loop.keeper import DistributedKeeper
from holter.rank.framework import Task


class FlatKeeper(DistributedKeeper):
    """Saves one rank's part; in a held step flat shards are gathered before."""

    def is_flat(self) -> bool:
        """Whether FSDP1 wraps one of the trained models."""
        roots = [model.root for model in self._models if model.root]
        return any(isinstance(each, FullyShardedDataParallel) for root in roots for each in root.modules())

    def _loses_averages(self, task: Task) -> bool:  # noqa: ARG002
        return True

    def _save_state(self, task: Task) -> None:
        self.is_sharded = True
        root = self._models[0].root
        assert root is not None
        found = named_state.find_others(self._optimizers, ())
        others = {each.key: each.holder.state_dict() for each in found}
        if task.is_rescue:
            self._save_part(task, root, others)
            return
        weights, optim = get_state_dict(root, self._optimizers)
        state = {"model": weights, "optim": optim, "step": task.completed, **others}
        dcp.save(state, checkpoint_id=task.state)
        self._written = list(_local(state, is_first=task.writes_shared))

    def _save_part(self, task: Task, root: torch.nn.Module, others: dict[str, Any]) -> None:
        """Save this rank's part alone, because gathering would wait for ranks that are blocked."""
        self.framework = PARTS
        part = parts.part_of(root, self._optimizers) | {"others": others, "step": task.completed}
        torch.save(part, parts.path_of(task.state, task.rank))
        self._written = list(parts.tensors_of(part))
        if task.writes_shared:
            self.notes.append(
                "each rank saved its part alone: `holter checkpoint assemble` makes one checkpoint of them"
            )


def _local(state: dict[str, Any], *, is_first: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what this rank has written of a gathered state: its shards, and the shared entries if it is the first."""
    for name, tensor in named_state.tensors(state):
        called = name.replace("optim.", "optimizer: ", 1) if name.startswith("optim.") else name
        if hasattr(tensor, "local_shards"):
            yield from ((called, shard.tensor) for shard in tensor.local_shards())
        elif hasattr(tensor, "to_local") or is_first:
            yield called, tensor
