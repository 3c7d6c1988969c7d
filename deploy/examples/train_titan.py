"""A loop in torchtitan's style: a Trainer with a device mesh, parts given to FSDP2, several optimizers and schedules behind one container, gradient accumulation, clipping.

    torchrun --standalone --nproc-per-node 2 -m holter deploy/examples/train_titan.py

It knows nothing of holter, and needs no torchtitan.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Block(nn.Module):
    """Attention and a feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal."""
        normed = self.attention_norm(x)
        q, k, v = (part(normed).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(seen.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Layers by name, as torchtitan's models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


class Optimizers:
    """One for each part of the model, stepped together."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=3e-3, weight_decay=0.1) for part in parts]
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / 5)) for one in self.optimizers
        ]

    def zero_grad(self) -> None:
        """Of all."""
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        """Of all, and their schedules."""
        for each in [*self.optimizers, *self.schedulers]:
            each.step()


class Trainer:
    """Model, optimizers and data; `train` runs to the end."""

    def __init__(self, steps: int, accumulate: int = 2) -> None:
        self.steps, self.accumulate = steps, accumulate
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        torch.manual_seed(1234)
        self.model = Transformer()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizers = Optimizers([self.model])
        self.draw = torch.Generator().manual_seed(1234 + dist.get_rank())

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Text in which each token says the next one, now and then."""
        while True:
            first = torch.randint(VOCABULARY, (8, 1), generator=self.draw)
            tokens = (first + torch.arange(LENGTH + 1)) % VOCABULARY
            is_other = torch.rand(tokens.shape, generator=self.draw) < 0.1  # noqa: PLR2004
            tokens[is_other] = torch.randint(VOCABULARY, (int(is_other.sum()),), generator=self.draw)
            yield tokens[:, :-1], tokens[:, 1:]

    def train_step(self, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Several micro-batches, one update."""
        self.optimizers.zero_grad()
        loss_sum = 0.0
        for micro in range(self.accumulate):
            self.model.set_requires_gradient_sync(micro == self.accumulate - 1)
            inputs, labels = next(batches)
            logits = self.model(inputs)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / self.accumulate
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.step()
        return loss_sum

    def train(self) -> None:
        """To the end."""
        batches = self.batches()
        for step in range(self.steps):
            loss = self.train_step(batches)
            if step % 10 == 0 and dist.get_rank() == 0:
                print(f"step {step:3d}  loss {loss:.4f}", flush=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    Trainer(options.steps).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
