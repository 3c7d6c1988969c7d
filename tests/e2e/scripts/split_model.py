"""A model whose ranks hold different tensors by the same names: split by hand, or with experts that DDP was told to ignore. A NaN on all ranks.

Before each step a rank writes down what it holds: `<out>/<rank>-<step>.pt`.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE = 8


class Part(nn.Module):
    """What all ranks share, and what each has for itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = nn.Linear(SIZE, SIZE)
        torch.manual_seed(100 + rank)
        self.expert = nn.Linear(SIZE, SIZE)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Both, one after the other."""
        return self.expert(torch.tanh(self.shared(inputs)))


def main() -> None:
    """Train until the NaN."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kind", choices=("split", "experts"))
    parser.add_argument("--at", type=int, default=6)
    told = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0 if told.kind == "experts" else rank)
    part: nn.Module = Part(rank)
    model = part
    if told.kind == "experts":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(part, ["expert.weight", "expert.bias"])
        model = DistributedDataParallel(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        held = {name: p.detach().clone() for name, p in part.named_parameters()}
        names = {id(p): name for name, p in part.named_parameters()}
        moments = {f"{names[id(p)]}.exp_avg": state["exp_avg"].clone() for p, state in optimizer.state.items()}
        torch.save({"model": held, "moments": moments}, told.out / f"{rank}-{step}.pt")
        inputs = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = model(inputs * (torch.nan if step == told.at else 1)).square().mean()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)


main()
