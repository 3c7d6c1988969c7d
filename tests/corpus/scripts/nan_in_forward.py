"""A logarithm of a negative number inside a module on rank 1 at step 20: finite input, NaN output."""

import torch
from common import DistributedDataParallel, batch, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()


class Log(nn.Module):
    """Compresses magnitudes, and forgot about negative ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logarithm."""
        return torch.log(x + 4.0)


class Model(nn.Module):
    """The fault is in `compress`, below `body`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"scale": nn.Linear(16, 16), "compress": Log(), "norm": nn.BatchNorm1d(16)})
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.body["norm"](self.body["compress"](torch.tanh(self.body["scale"](x)) + x.clamp(-50, 2)))
        return self.head(self.drop(x))


model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    x = x.clamp(-2, 2)
    if step == 20 and rank == 1 and not arguments.healthy:
        x[1, 1] = -40.0
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
