"""One rank calls two collectives in the other order than its peers, once."""

import torch
import torch.distributed as dist
from common import DistributedDataParallel, Net, batch, finish, options, start, work
from torch.nn.functional import cross_entropy

# `broadcast`: a broadcast and an all_reduce of the same size. `gather`: an all_gather and an all_reduce.
arguments = options("broadcast", "gather", "barrier", steps=50)
rank = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
table, counts = torch.ones(64), torch.ones(64)
parts = [torch.empty(64) for _ in range(dist.get_world_size())]
second = {
    "broadcast": lambda: dist.broadcast(table, 0),
    "gather": lambda: dist.all_gather(parts, table),
    "barrier": dist.barrier,
}[arguments.how]
for step in range(arguments.steps):
    x, y = batch(rank, step)
    work()
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    is_now = step == arguments.at and rank == arguments.culprit and not arguments.healthy
    if is_now:
        second()
    counts.fill_(1)
    dist.all_reduce(counts)
    if not is_now:
        second()
finish()
