"""fp16 linear layers of growing magnitude: the second passes 65504 (the mt5 fp16 case). The twin's weights are of ordinary size."""

import torch
from common import DistributedDataParallel, batch, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
net = nn.Sequential()
for number in range(3):
    net.add_module(f"layer{number}", nn.Linear(16, 16))
net.add_module("head", nn.Linear(16, 4))
with torch.no_grad():
    for parameter in net.parameters():
        parameter.mul_(1.0 if arguments.healthy else 600.0)
model = DistributedDataParallel(net.half())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x.half()).float(), y).backward()
    optimizer.step()
finish()
