"""Layer `a` is frozen, the model is wrapped, `a` is unfrozen: DDP's reducer does not know it (Lightning#20340)."""

import torch
from common import DistributedDataParallel, batch, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
net = nn.Sequential()
net.add_module("a", nn.Linear(16, 32))
net.add_module("activation", nn.GELU())
net.add_module("b", nn.Linear(32, 32))
net.add_module("head", nn.Linear(32, 4))
if not arguments.healthy:
    net.a.requires_grad_(requires_grad=False)
model = DistributedDataParallel(net)
net.a.requires_grad_()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
