"""What the fault scripts share: a small model under DDP on gloo, trained on made-up numbers. No script here imports holter."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def options() -> argparse.Namespace:
    """`--healthy` makes the twin: the same script without the fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def start() -> int:
    """Join the group; returns the rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    return dist.get_rank()


class Net(nn.Module):
    """An encoder, a block and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, width)
        self.block = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(self.block(torch.tanh(self.encoder(x))))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def finish() -> None:
    """Leave the group."""
    dist.barrier()
    dist.destroy_process_group()


__all__ = ["DistributedDataParallel", "Net", "batch", "finish", "options", "start"]
