"""Rank 0 saves its weights every ten steps, one file after the other, and goes on saving after a NaN has reached them at step 25."""

import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    x = torch.randn(8, 16)
    if step == 25 and rank == 1:
        x[0, 0] = float("nan")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if rank == 0 and step % 10 == 9:
        torch.save({"model": model.module.state_dict(), "step": step + 1}, f"weights-{step + 1}.pt")
dist.barrier()
dist.destroy_process_group()
