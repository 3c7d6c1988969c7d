"""A frozen encoder, used beside the trained model, holds on rank 1 what `to_empty` left (transformers#25686)."""

import torch
from common import DistributedDataParallel, batch, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()


class Encoder(nn.Module):
    """Stands for what a checkpoint would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features."""
        return self.second(torch.relu(self.first(x)))


encoder = Encoder()
if rank == 1 and not arguments.healthy:
    with torch.device("meta"):
        encoder = Encoder()
    encoder.to_empty(device="cpu")
    for parameter in encoder.parameters():
        parameter.data.zero_()
encoder.requires_grad_(requires_grad=False).eval()
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    with torch.no_grad():
        features = encoder(x)
    optimizer.zero_grad()
    cross_entropy(model(features), y).backward()
    optimizer.step()
finish()
