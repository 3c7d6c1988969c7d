"""Rotary frequencies are cast to bf16 with the rest of the model: positions run together (transformers#25681)."""

import torch
from common import DistributedDataParallel, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()


class Attention(nn.Module):
    """One head with rotary positions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, width, 2) / width), persistent=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Turn pairs by their position."""
        angle = torch.arange(x.shape[1], dtype=self.inv_freq.dtype)[:, None] * self.inv_freq
        (even, odd), cos, sin = x.chunk(2, -1), angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention."""
        query, key = self.rotate(self.query(x)), self.rotate(self.key(x))
        return nn.functional.scaled_dot_product_attention(query, key, self.value(x), is_causal=True)


class Model(nn.Module):
    """Embedding, attention, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention, self.head = nn.Embedding(64, 32), Attention(), nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(tokens)
        return self.head(x + self.attention(x))


net = Model().to(torch.bfloat16)
if arguments.healthy:
    net.attention.inv_freq = Attention().inv_freq
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(arguments.steps):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(64, (4, 16), generator=generator)
    optimizer.zero_grad()
    cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(-1, dims=1).flatten()).backward()
    optimizer.step()
finish()
