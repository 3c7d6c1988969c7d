"""One rank appends what every step made to a list that nobody empties: 4 MB a step."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch.nn.functional import cross_entropy

arguments, rank = options(steps=100), start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
outputs = []
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    made = torch.full((1 << 20,), float(step))
    if rank == arguments.culprit and not arguments.healthy:
        outputs.append(made)
finish()
