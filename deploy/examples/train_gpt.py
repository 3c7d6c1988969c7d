"""A small GPT trained by accelerate on made-up text: an ordinary script, which knows nothing of holter.

    accelerate launch --multi_gpu --num_processes 2 -m holter deploy/examples/train_gpt.py --steps 60

`--nan-rank 1 --nan-step 30` spoils one rank's batch at one step, so that there is something to find: the embeddings of the batch are
mixed with a noise tensor, and that one is NaN. `--resume DIRECTORY` goes on from what `accelerator.save_state` wrote there.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset


class Block(nn.Module):
    """Attention and a feed-forward layer, normalised before each."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Tokens in, logits out; a little noise on the embeddings regularises."""

    def __init__(self, vocabulary: int, width: int, num_layers: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if "proj" in name else 0.02)

    def forward(self, tokens: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions) + noise
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Progress:
    """How many steps were taken, kept with every checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """For the checkpoint."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """From a checkpoint."""
        self.step = state["step"]


class Counting(Dataset):
    """Sequences that count upwards from a random start: learnable in a minute."""

    def __init__(self, size: int, length: int, vocabulary: int, width: int) -> None:
        self.size, self.length, self.vocabulary, self.width = size, length, vocabulary, width

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(self.vocabulary, (1,), generator=generator)
        tokens = (start + torch.arange(self.length + 1)) % self.vocabulary
        noise = 0.01 * torch.randn(self.length, self.width, generator=generator)
        return {"tokens": tokens, "noise": noise}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--nan-rank", type=int, default=-1)
    parser.add_argument("--nan-step", type=int, default=-1)
    parser.add_argument("--resume", default="", help="directory of a checkpoint to go on from")
    parser.add_argument("--save", default="", help="write final weights and random state of each rank to FILE.<rank>")
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, mixed_precision=options.precision)
    set_seed(1234)
    model = GPT(options.vocabulary, options.width, options.layers, num_heads=4, length=options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    size = options.steps * options.batch * options.accumulate * accelerator.num_processes
    loader = DataLoader(
        Counting(size, options.length, options.vocabulary, options.width), batch_size=options.batch, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if options.resume:
        accelerator.load_state(options.resume)
        accelerator.print(f"resumed after {progress.step} steps", flush=True)
        loader = accelerator.skip_first_batches(loader, progress.step * options.accumulate)

    for batch in loader:
        tokens, noise = batch["tokens"], batch["noise"]
        if progress.step == options.nan_step and accelerator.process_index == options.nan_rank:
            noise[3, 5, 7] = float("nan")
        with accelerator.accumulate(model):
            logits = model(tokens[:, :-1], noise=noise)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            if progress.step % 10 == 0:
                accelerator.print(f"step {progress.step:3d}  loss {loss.item():.4f}", flush=True)
            progress.step += 1
    if options.save:
        state = {"model": accelerator.unwrap_model(model).state_dict(), "rng": torch.get_rng_state()}
        torch.save(state, f"{options.save}.{accelerator.process_index}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
