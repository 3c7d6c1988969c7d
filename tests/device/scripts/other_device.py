"""A job on whatever accelerator there is: DDP, `fully_shard` or one rank, with a fault of one rank if told, and without Triton if told. It knows nothing of the tests' device."""

import argparse
import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["alone", "ddp", "fsdp"])
parser.add_argument("--fault", choices=["batch", "layer", "diverge"])
parser.add_argument("--at", type=int, default=20)
parser.add_argument("--by", choices=["fused", "foreach", "single"], default="foreach")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--without-triton", action="store_true")
given = parser.parse_args()
if given.without_triton:
    sys.modules["triton"] = None  # as if it were not installed


class Poisoned(torch.nn.Module):
    """A layer that makes a NaN of finite numbers, once."""

    is_due = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As it is, or with the square root of a negative number."""
        return (-x.abs() - 1).sqrt() if self.is_due else x


rank, name = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.current_accelerator().type
device = torch.device(name, rank)
torch.accelerator.set_device_index(rank)
is_alone = given.kind == "alone"
if not is_alone:
    dist.init_process_group("nccl" if name == "cuda" else "hccl")
torch.manual_seed(0)
layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), Poisoned(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8)]
plain = model = torch.nn.Sequential(*layers).to(device)
if given.kind == "ddp":
    model = DistributedDataParallel(model)
elif given.kind == "fsdp":
    for layer in (model[0], model[4], model):
        fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **({} if given.by == "single" else {given.by: True}))
is_culprit = rank == 1 or is_alone
for step in range(given.steps):
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank))
    if is_culprit and step == given.at:
        plain[2].is_due = given.fault == "layer"
        if given.fault == "batch":
            batch[0, 3] = float("nan")
        if given.fault == "diverge":
            with torch.no_grad():
                plain[4].weight[0, 0] += 1e-3
    loss = model(batch.to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    plain[2].is_due = False
whole = [parameter.full_tensor() if given.kind == "fsdp" else parameter for parameter in model.parameters()]
digest = hashlib.sha256(b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in whole)).hexdigest()
print(json.dumps({"device": str(device), "weights": digest, "loss": loss.item()}), flush=True)
if not is_alone:
    dist.destroy_process_group()
