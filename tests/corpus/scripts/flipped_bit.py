"""One bit of one weight flips on rank 1 between two steps, as a failing memory module would do it."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    if step == 20 and rank == 1 and not arguments.healthy:
        words = model.module.block[0].weight.data.view(torch.int32)
        words[3, 5] ^= 1 << 12
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
