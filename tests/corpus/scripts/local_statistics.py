"""BatchNorm under DDP(broadcast_buffers=False), each rank with its own data: running statistics part (pytorch#13711)."""

import torch
from common import DistributedDataParallel, batch, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
model = DistributedDataParallel(net, broadcast_buffers=arguments.healthy)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
