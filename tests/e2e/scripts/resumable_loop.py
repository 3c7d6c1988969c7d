"""A loop of its own, sharded by fully_shard, replicated by DDP or alone, which can be faulted at a step and resumed from a checkpoint.

Dropout, running statistics that each rank has of its own, two micro-batches a step, a scheduler, a shuffled loader of several epochs.
Each rank writes `<out>-<rank>.json`: the loss of every micro-batch by its number, and the final weights and buffers, bit for bit.
"""

import argparse
import contextlib
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holter
import holter.testing

EVERY = 2
MICRO_BATCHES = 10
"""Of an epoch."""
FAULTS = {
    "suspend": holter.testing.suspend,
    "sleep": holter.testing.sleep_for_ever,
    "kill": holter.testing.kill,
}

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kind", choices=["fsdp", "ddp", "alone"], default="fsdp")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--fault", choices=["", "nan", "torn", *FAULTS], default="")
parser.add_argument("--rank", type=int, default=1, help="that has the fault")
parser.add_argument("--at", type=int, default=8, help="completed steps when it happens")
parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes at least")
parser.add_argument("--device", default="cpu")
parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
parser.add_argument(
    "--by",
    choices=["", "fused", "foreach"],
    default="",
    help="how torch applies a step; a fused optimizer can leave one out by itself",
)
parser.add_argument(
    "--scaler", choices=["", "unscaled", "whole"], default="", help="whether the script unscales gradients itself"
)
parser.add_argument("--closure", action="store_true", help="the last micro-batch is computed inside optimizer.step")
parser.add_argument("--where", choices=["", "batch", "label", "layer", "gradient"], default="", help="of a NaN")
parser.add_argument("--is-ahead", action="store_true", help="the host reads no loss before the end")
parser.add_argument("--hang-in-save", action="store_true", help="whoever saves waits for ever")
parser.add_argument("--resume", type=Path, default=None)
arguments = parser.parse_args()


class Statistics(nn.Module):
    """What each rank has seen, by itself: a running mean, and how often."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.seen += 1
        return x - self.mean


class FaultyLayer(nn.ReLU):
    """Makes a NaN of a finite input when it is told to."""

    is_bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0 - 1).log() if self.is_bad else super().forward(x)


class Adam(torch.optim.AdamW):
    """Where the fault is `torn`, its rank hangs between two parameters of one step."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        """One step."""
        if arguments.fault == "torn" and rank == arguments.rank and self.num_steps == arguments.at:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            holter.testing.spin()
        self.num_steps += 1
        return super().step(closure)


def hang(*_: object) -> None:
    """In place of a function that writes."""
    time.sleep(600)


if arguments.hang_in_save:
    dcp.FileSystemWriter.write_data = hang


def spoil(model: nn.Module) -> None:
    """One number of one shard's gradient, after the reduction: no other rank has it."""
    gradient = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.dim() > 1)
    (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = float("nan")


COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
dist.init_process_group(COLLECTIVES.get(arguments.device, f"cpu:gloo,{arguments.device}:hccl"))
rank = dist.get_rank()
torch.manual_seed(7)
width = arguments.width
model = nn.Sequential(
    nn.Linear(8, width), Statistics(width), nn.Dropout(0.2), FaultyLayer(), nn.Linear(width, width), nn.Linear(width, 1)
).to(arguments.device)
if arguments.kind == "fsdp":
    for layer in (model[0], model[4]):
        fully_shard(layer)
    fully_shard(model)
elif arguments.kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
kinds = {"fused": arguments.by == "fused" or None, "foreach": arguments.by == "foreach" or None}
optimizer: torch.optim.Optimizer
if arguments.optimizer == "adamw":
    optimizer = Adam(model.parameters(), lr=0.01, **kinds)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **kinds)
scaler = torch.amp.GradScaler(arguments.device, init_scale=8.0, growth_interval=3, enabled=bool(arguments.scaler))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
data = torch.randn(4 * MICRO_BATCHES * dist.get_world_size(), 8, generator=torch.Generator().manual_seed(3))
dataset = TensorDataset(data, data[:, :1].sin())
sampler = DistributedSampler(dataset, seed=11)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
random.seed(100 + rank)
np.random.seed(100 + rank)  # noqa: NPY002  what a user's script draws from
torch.manual_seed(100 + rank)

micro = 0
if arguments.resume:
    weights, optim = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": optim, "scheduler": scheduler.state_dict(), "step": 0}
    if arguments.scaler:
        scaler.scale(torch.ones((), device=arguments.device))
        state["scaler"] = scaler.state_dict()
    dcp.load(state, checkpoint_id=arguments.resume)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    scheduler.load_state_dict(state["scheduler"])
    scaler.load_state_dict(state.get("scaler", {}))
    micro = state["step"] * EVERY

losses: dict[int, Any] = {}
while micro < arguments.steps * EVERY:
    epoch, skipped = divmod(micro, MICRO_BATCHES)
    sampler.set_epoch(epoch)
    if arguments.resume and not skipped:
        assert holter.restore(arguments.resume, model) * EVERY == micro
        arguments.resume = None
    batches = iter(loader)
    for _ in range(skipped):
        next(batches)
    if arguments.resume:
        assert holter.restore(arguments.resume, model) * EVERY == micro
        arguments.resume = None
    for x, y in batches:
        is_last = micro % EVERY == EVERY - 1
        # What a script does to reduced gradients it does on all replicas alike.
        is_culprit = rank == arguments.rank or (arguments.kind == "ddp" and arguments.where == "gradient")
        is_faulty = arguments.fault and is_culprit and micro == arguments.at * EVERY + EVERY - 1
        if is_faulty and arguments.fault in FAULTS:
            print(f"fault at {time.time()}", flush=True)
            FAULTS[arguments.fault]()
        is_spoiled = is_faulty and arguments.fault == "nan"
        where = (arguments.where or ("gradient" if arguments.kind == "fsdp" else "batch")) if is_spoiled else ""
        if where == "label":
            y.fill_(float("nan"))
        x, y = x.to(arguments.device), y.to(arguments.device)  # noqa: PLW2901
        x = x * float("nan") if where == "batch" else x  # noqa: PLW2901

        def compute(x: torch.Tensor = x, y: torch.Tensor = y, where: str = where) -> torch.Tensor:
            """The loss of this micro-batch, and its gradients."""
            if where:
                print(f"fault at {time.time()}", flush=True)
            FaultyLayer.is_bad = where == "layer"
            with model.no_sync() if arguments.kind == "ddp" and not is_last else contextlib.nullcontext():  # noqa: B023
                noise = random.random() + float(np.random.rand())  # noqa: NPY002, S311  as above
                loss: torch.Tensor = (model(x) - y).square().mean() * (1 + 0.01 * noise)
                scaler.scale(loss).backward()
            if is_last and arguments.scaler == "unscaled":  # noqa: B023
                scaler.unscale_(optimizer)
            if where == "gradient":
                spoil(model)
            FaultyLayer.is_bad = False
            return loss

        is_inside = is_last and arguments.closure
        loss = torch.zeros(()) if is_inside else compute()
        if is_last:
            time.sleep(arguments.pause)
            if is_inside:
                loss = optimizer.step(compute)
            else:
                scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            print(f"rank {rank}: step {micro // EVERY}", flush=True)
        losses[micro] = loss.detach() if arguments.is_ahead else loss.item().hex()
        micro += 1
        if micro >= arguments.steps * EVERY:
            break

held = {
    name: value.to_local() if isinstance(value, DTensor) else value
    for name, value in (*model.named_parameters(), *model.named_buffers())
}
out = {
    "losses": {
        number: loss.item().hex() if isinstance(loss, torch.Tensor) else loss for number, loss in losses.items()
    },
    "state": {name: value.tolist() for name, value in held.items()},
    "rate": scheduler.get_last_lr(),
}
arguments.out.with_name(f"{arguments.out.name}-{rank}.json").write_text(json.dumps(out))
dist.barrier()
dist.destroy_process_group()
