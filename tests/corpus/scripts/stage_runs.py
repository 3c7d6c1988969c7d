"""Stages of torch's pipelines on four ranks that load, tie, flip and dawdle; each with its twin (`--healthy`).

other_file    stage 2 loads the file of stage 1
local_names   each stage takes the first layer of a whole model's file, which it calls by that name itself
untied        the embedding and the head begin as one, and nobody adds up their gradients
flipped       a bit of stage 1's weight flips between two steps
slow_part     stage 2 takes long over its third micro-batch, from a step on
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import work
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, LENGTH, MICRO_BATCHES = 32, 32, 8, 4
SLOW_S = 0.15


class Layer(nn.Module):
    """A norm and two matrices, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Part(nn.Module):
    """One stage."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if rank == 0 else nn.Identity()
        self.layer = Layer()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if rank == size - 1 else nn.Identity()
        self.number, self.slow_call = 0, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its part of the whole."""
        if self.number == self.slow_call:
            time.sleep(SLOW_S)
        self.number += 1
        return self.head(self.layer(self.embedding(x)))


def saved(rank: int) -> Path:
    """What an earlier run left: a file for each stage, and one of the whole."""
    folder = Path(tempfile.gettempdir()) / f"stages-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    torch.manual_seed(100 + rank)
    torch.save({"layer": Layer().state_dict(), "step": 500}, folder / f"stage_{rank}.pt")
    if rank == 0:
        whole = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(dist.get_world_size()))})
        torch.save(whole.state_dict(), folder / "whole.pt")
    dist.barrier()
    return folder


def load(model: Part, kind: str, rank: int, *, is_bad: bool) -> None:
    """The weights that the kind is about."""
    folder = saved(rank)
    if kind == "other_file":
        number = 1 if is_bad and rank == 2 else rank
        model.layer.load_state_dict(torch.load(folder / f"stage_{number}.pt")["layer"])
    else:
        number, state = 0 if is_bad else rank, torch.load(folder / "whole.pt")
        begin = f"layers.{number}."
        model.layer.load_state_dict({n.removeprefix(begin): t for n, t in state.items() if n.startswith(begin)})


def tie(model: Part, rank: int, size: int) -> None:
    """The head begins as the embedding."""
    shared = model.embedding.weight.detach().clone() if rank == 0 else torch.empty(VOCABULARY, WIDTH)
    dist.broadcast(shared, 0)
    if rank == size - 1:
        model.head.weight.data.copy_(shared)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--at", type=int, default=20)
    told = parser.parse_args()
    is_bad, kind = not told.healthy, told.kind
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Part(rank, size)
    if kind in {"other_file", "local_names"}:
        load(model, kind, rank, is_bad=is_bad)
    ends = dist.new_group([0, size - 1])
    if kind == "untied":
        tie(model, rank, size)
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, MICRO_BATCHES, loss_fn=lambda found, wanted: cross_entropy(found.flatten(0, 1), wanted.flatten())
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(80 if kind == "slow_part" else 36):
        tokens = torch.randint(VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step))
        is_slow = kind == "slow_part" and is_bad and rank == 2 and step >= told.at
        model.number, model.slow_call = 0, 2 if is_slow else -1
        if kind == "flipped" and is_bad and rank == 1 and step == told.at:
            model.layer.up.weight.data.view(torch.int32)[3, 5] ^= 1 << 22
        inputs = (tokens,) if rank == 0 else ()
        targets = {"target": (3 * tokens + 1) % VOCABULARY} if rank == size - 1 else {}
        schedule.step(*inputs, **targets)
        if kind == "untied" and not is_bad and rank in {0, size - 1}:
            dist.all_reduce((model.embedding if rank == 0 else model.head).weight.grad, group=ends)
        optimizer.step()
        optimizer.zero_grad()
        work(0.02)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
