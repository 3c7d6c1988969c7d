"""Reentrant checkpointing on the output of a frozen embedding: the blocks get no gradient (transformers#26221)."""

import torch
from common import DistributedDataParallel, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

arguments, rank = options(), start()


class Model(nn.Module):
    """An embedding that is frozen, two blocks that are checkpointed, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.embedding.requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(tokens)
        if arguments.healthy:
            x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


model = DistributedDataParallel(Model(), find_unused_parameters=not arguments.healthy)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
for step in range(arguments.steps):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(64, (8, 12), generator=generator)
    optimizer.zero_grad()
    cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, dims=1).flatten()).backward()
    optimizer.step()
finish()
