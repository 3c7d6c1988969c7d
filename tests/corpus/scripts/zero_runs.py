"""ZeRO by DeepSpeed's own `initialize`, on gloo ranks, with a fault if one is named."""

import argparse

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from common import work
from torch import nn
from torch.nn.functional import cross_entropy

# Compiled at first use for a minute, and used by inference alone.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

parser = argparse.ArgumentParser()
parser.add_argument("stage", type=int)
parser.add_argument("--fault", default="")
parser.add_argument("--healthy", action="store_true")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--at", type=int, default=12)
parser.add_argument("--culprit", type=int, default=1)
told = parser.parse_args()
fault = "" if told.healthy else told.fault

deepspeed.init_distributed("gloo")
rank, is_here = dist.get_rank(), dist.get_rank() == told.culprit


class Net(nn.Module):
    """An embedding, a table, two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.register_buffer("positions", torch.randn(8, 32) / 10)
        self.frozen = nn.Linear(32, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(tokens) + self.positions
        x = x + self.down(torch.nn.functional.gelu(self.up(x + self.frozen(x))))
        return self.head(x)


def flip(tensor: torch.Tensor) -> None:
    """One bit of one element."""
    tensor.detach().reshape(-1)[5:6].view(torch.int32)[0] ^= 1 << 12


torch.manual_seed(7)
net = Net()
net.frozen.requires_grad_(requires_grad=False)
if fault == "other_buffer" and is_here:
    net.positions += 0.01
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=3e-3)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": told.stage},
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 5.0,
}
engine, zero, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
if fault == "other_rate" and is_here:
    zero.optimizer.param_groups[0]["lr"] *= 1.5
if fault == "frozen_garbage" and is_here:
    getattr(net.frozen.weight, "ds_tensor", net.frozen.weight).data.fill_(3e19)
for step in range(told.steps):
    if step == told.at and is_here:
        flats = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
        if fault == "flip_partition":
            flip(flats[0])
        elif fault == "flip_weight":
            flip(getattr(net.up.weight, "ds_tensor", net.up.weight))
        elif fault == "late_rate":
            zero.optimizer.param_groups[0]["lr"] *= 0.5
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(32, (4, 8), generator=generator)
    loss = cross_entropy(engine(tokens).flatten(0, 1), ((3 * tokens + 1) % 32).flatten())
    engine.backward(loss)
    engine.step()
    work(0.02)
dist.barrier()
