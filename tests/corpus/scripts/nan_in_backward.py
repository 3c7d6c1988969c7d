"""The square root of exactly zero on rank 1 at step 20: the loss is finite, its gradient is not."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()


class Model(nn.Module):
    """A distance to a learnt centre is added to the first logit."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Linear(16, 16, bias=False)
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits and distance."""
        distance = self.centre(x).pow(2).sum(1, keepdim=True).sqrt()
        return self.net(x) + nn.functional.pad(distance, (0, 3))


model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    if step == 20 and rank == 1 and not arguments.healthy:
        x[0] = 0.0
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
