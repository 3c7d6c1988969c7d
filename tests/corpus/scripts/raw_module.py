"""The raw module is called instead of its wrapper: no reduction ever starts."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
net = Net()
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    logits = model(x) if arguments.healthy else net(x)
    cross_entropy(logits, y).backward()
    optimizer.step()
finish()
