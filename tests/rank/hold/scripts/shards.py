"""Trains a model that lies on the ranks in a given way; when all have met, one number of one rank's gradient is spoiled.

The halt agent is one that writes down, and lets go once all ranks stand or some seconds are over. Each rank writes `<out>-<rank>.json`.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from holter.frameworks import attach

AGREED_STEPS = 20
MOST_STEPS = 5000
STAND_S = 20.0

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kind", choices=["fsdp", "hsdp", "flat", "ddp"], required=True)
parser.add_argument("--rank", type=int, default=1, help="that has the fault")
parser.add_argument("--optimizers", type=int, default=1)
arguments = parser.parse_args()


class Recording:
    """An agent that decides nothing. Whoever is let go leaves the agreement, so that nobody may be while others still have to learn why to stand."""

    def __init__(self) -> None:
        self.holds: list[tuple[int, str]] = []

    def is_due(self, _step: int) -> bool:
        return False

    def is_wanted(self) -> bool:
        return not self.holds

    def hold(self, step: int, why: str, num_skipped: int = 0) -> None:  # noqa: ARG002
        self.holds.append((step, why))
        # A connection of our own: the job's may be busy.
        store, until_s = c10d._get_default_store().clone(), time.monotonic() + STAND_S
        store.add("held", 1)
        while store.add("held", 0) < dist.get_world_size() and time.monotonic() < until_s:
            time.sleep(0.01)

    def linger(self, why: str) -> None:
        pass


def place(model: nn.Sequential) -> nn.Module:
    if arguments.kind == "flat":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if arguments.kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if arguments.kind == "hsdp" else None
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def spoil(model: nn.Module) -> None:
    gradients = (p.grad for p in reversed(list(model.parameters())) if p.grad is not None)
    held = (gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients)
    next(part for part in held if part.numel()).view(-1)[-1] = float("nan")


dist.init_process_group("gloo")
context = attach.attach().monitor.context
context.hold.agent = agent = Recording()
peers = context.hold.peers
torch.manual_seed(7)
model = place(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 8)))
parameters = list(model.parameters())
cut = len(parameters) // arguments.optimizers
optimizers = [
    torch.optim.AdamW(parameters[number * cut : (number + 1) * cut if number + 1 < arguments.optimizers else None])
    for number in range(arguments.optimizers)
]
step, fault_step = 0, AGREED_STEPS if arguments.kind == "ddp" else MOST_STEPS
while step <= min(fault_step, MOST_STEPS):
    model(torch.randn(4, 8)).square().mean().backward()
    if step == fault_step and (dist.get_rank() == arguments.rank or arguments.kind == "ddp"):
        spoil(model)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    step += 1
    have_met = torch.tensor(float(peers.has_begun))
    dist.all_reduce(have_met, op=dist.ReduceOp.MIN)
    if have_met and fault_step == MOST_STEPS:
        fault_step = step + AGREED_STEPS
    time.sleep(0.002)

out = {
    "fault_step": fault_step,
    "holds": agent.holds,
    "poisoned": context.hold.poisoned_step,
    "was_asked": peers._thread is not None,
    "waited_s": peers.waited_s,
    "own_s": context.guard.own_s,
    "is_over": peers.is_over,
    "failures": context.guard.failures,
}
arguments.out.with_name(f"{arguments.out.name}-{dist.get_rank()}.json").write_text(json.dumps(out))
dist.barrier()
dist.destroy_process_group()
