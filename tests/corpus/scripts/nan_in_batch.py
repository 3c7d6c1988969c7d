"""A NaN in rank 1's batch at step 30; after the reduction every rank has it (Megatron-LM#470)."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start, work
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    work(arguments.pause)
    if step == 30 and rank == 1 and not arguments.healthy:
        x[2, 3] = float("nan")
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
