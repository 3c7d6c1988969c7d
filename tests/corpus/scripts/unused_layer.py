"""A layer that the forward pass never uses, with find_unused_parameters=False: its bucket is never reduced (pytorch#128949).

DDP complains only when the next forward pass begins: by then the optimizer has stepped with each rank's own gradients.
"""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
net = Net()
if not arguments.healthy:
    net.spare = nn.Linear(8, 8)
model = DistributedDataParallel(net, find_unused_parameters=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
