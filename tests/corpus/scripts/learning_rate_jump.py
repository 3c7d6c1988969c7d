"""The learning rate is multiplied by 50 at step 40: the norm spikes, then the loss."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
model = DistributedDataParallel(Net(width=64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
for step in range(max(arguments.steps, 80)):
    if step == 40 and not arguments.healthy:
        for group in optimizer.param_groups:
            group["lr"] *= 50
    x, _ = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), (x @ teacher).argmax(-1)).backward()
    optimizer.step()
finish()
