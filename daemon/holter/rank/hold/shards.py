"""Where each rank applies a shard, a NaN in one is seen by one rank alone: here the others learn it before they apply theirs.

DTensors that are split over some axis of their mesh, FSDP's flat parameters, ZeRO's partitions. All ranks of the job agree, which is
simplest: replicas of a shard say the same twice. Replicated models are not asked and pay nothing; neither is a step that a
loss scaler answers for. Whether a rank is asked depends on the script's code and on how its model lies on the ranks, not on what the rank has
seen: all are asked before the same steps. What it costs stands in `circle`.
"""

import weakref

import torch

from holter.rank.context import Context
from holter.rank.guard import say
from holter.rank.hooks.clips import FLAT
from holter.rank.placement import is_split
from holter.records import SightLost


class Shards:
    """Asks the other ranks; one for a rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._split: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        """By optimizer: the number of its parameters, and whether one of them was split then."""

    def agree(self, optimizer: torch.optim.Optimizer, bad_step: int | None) -> int | None:
        """The first step that is not finite on any rank, as far as is known before this one is applied; `bad_step` is our own."""
        context = self._context
        peers = context.hold.peers
        if peers is None or peers.is_over or not self._is_split(optimizer):
            self._tell_loss()
            return bad_step
        waited_s = peers.waited_s
        first = peers.agree(context.log.step, bad_step)
        context.guard.own_s -= peers.waited_s - waited_s
        self._tell_loss()
        return first

    def leave(self) -> None:
        """Steps are not held any more: nobody is to wait for our word."""
        if self._context.hold.peers is not None:
            self._context.hold.peers.leave()

    def _is_split(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer in self._context.frameworks.partitioned:
            return True
        num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._split.get(optimizer)
        if known is None or known[0] != num_parameters:
            held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
            known = num_parameters, any(map(is_split, held.values())) or self._is_flat(held)
            self._split[optimizer] = known
        return known[1]

    def _is_flat(self, held: dict[int, torch.Tensor]) -> bool:
        return any(
            model.wrapper == FLAT and any(id(p) in held for _, p in model.parameters) for model in self._context.models
        )

    def _tell_loss(self) -> None:
        context = self._context
        peers = context.hold.peers
        if peers is None or not peers.loss:
            return
        what, peers.loss = f"shards are not agreed on any more: {peers.loss}", ""
        say(f"rank {context.writer.rank}: {what}; one that is not finite is held on its own rank alone")
        context.writer.say(context.log.step, SightLost(what=what, dropped=context.writer.page.dropped))
