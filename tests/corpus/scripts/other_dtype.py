"""One rank counts in int32 what the others count in float32: one all_reduce, the same width, no error, wrong numbers."""

import torch
import torch.distributed as dist
from common import DistributedDataParallel, Net, batch, finish, options, start, work
from torch.nn.functional import cross_entropy

# `once`: at one step. `always`: from that step on. `narrow`: float16 against float32 at one step, which does not fit.
arguments = options("once", "always", "narrow", steps=120)
rank = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    work()
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    is_now = step >= arguments.at if arguments.how == "always" else step == arguments.at
    other = torch.float16 if arguments.how == "narrow" else torch.int32
    is_other = is_now and rank == arguments.culprit and not arguments.healthy
    count = torch.full((64,), 8, dtype=other if is_other else torch.float32)
    dist.all_reduce(count)
finish()
