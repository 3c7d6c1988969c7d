"""Rank 0 freezes `a`, rank 1 freezes `b`, of the same shapes: DDP raises nothing, and reduces `b` into `a`."""

import torch
from common import DistributedDataParallel, batch, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
net = nn.Sequential()
net.add_module("a", nn.Linear(16, 16))
net.add_module("b", nn.Linear(16, 16))
net.add_module("head", nn.Linear(16, 4))
frozen = "b" if rank == 1 and not arguments.healthy else "a"
net.get_submodule(frozen).requires_grad_(requires_grad=False)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
