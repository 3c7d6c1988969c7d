"""Each rank seeds with its number and DDP is told not to synchronise: replicas differ from step 0 (pytorch#48188)."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
torch.manual_seed(7 if arguments.healthy else rank)
model = DistributedDataParallel(Net(), init_sync=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
