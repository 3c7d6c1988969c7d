"""FSDP1: a checkpoint of torch.distributed.checkpoint, made by its own collectives, which only a held step allows."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from holter.errors import SaveError
from holter.frameworks.loop.keeper import DistributedKeeper
from holter.rank.framework import Task


class FlatKeeper(DistributedKeeper):
    """One rank's part; flat shards are gathered before they are saved."""

    def is_flat(self) -> bool:
        """Whether FSDP1 holds one of the trained models."""
        roots = [model.root for model in self._models if model.root]
        return any(isinstance(each, FullyShardedDataParallel) for root in roots for each in root.modules())

    def _loses_averages(self, task: Task) -> bool:  # noqa: ARG002
        return True

    def _save_state(self, task: Task) -> None:
        if task.is_rescue:
            raise SaveError(
                "FSDP1 gathers its shards to save them, and the ranks are blocked (fully_shard can save without)"
            )
        self.is_sharded = True
        root = self._models[0].root
        assert root is not None
        weights, optim = get_state_dict(root, self._optimizers)
        dcp.save({"model": weights, "optim": optim, "step": task.completed}, checkpoint_id=task.state)
