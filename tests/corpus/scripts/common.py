"""What the fault scripts share: a small model under DDP on gloo, trained on made-up numbers. No script here imports holter."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def options(*hows: str, steps: int = 40) -> argparse.Namespace:
    """`--healthy` makes the twin: the same script without the fault. `hows` are the kinds of it, if there are several."""
    parser = argparse.ArgumentParser()
    if hows:
        parser.add_argument("how", choices=hows)
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--culprit", type=int, default=1, help="rank with the fault, where one has it")
    parser.add_argument("--at", type=int, default=25, help="step of the fault, where it has one")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds of other work in each step, where it is asked for"
    )
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


def work(seconds: float = 0.03) -> None:
    """The rest of a step of tens of milliseconds: what a larger model would compute."""
    time.sleep(seconds)


def finish() -> None:
    """Leave the group."""
    dist.barrier()
    dist.destroy_process_group()


__all__ = ["DistributedDataParallel", "Net", "batch", "finish", "options", "start", "work"]
