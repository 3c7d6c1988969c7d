"""Nobody calls zero_grad: every step applies the sum of all gradients so far (StackOverflow 60335387)."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    if arguments.healthy:
        optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
