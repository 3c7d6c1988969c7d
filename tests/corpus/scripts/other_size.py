"""One rank reduces 200 elements where the others reduce 100 (DeepSpeed#5794): gloo aborts a process, and not always the same."""

import torch
import torch.distributed as dist
from common import DistributedDataParallel, Net, batch, finish, options, start, work
from torch.nn.functional import cross_entropy

arguments, rank = options(steps=50), start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    work()
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    is_now = step == arguments.at and rank == arguments.culprit and not arguments.healthy
    usage = torch.ones(200 if is_now else 100)
    dist.all_reduce(usage)
finish()
