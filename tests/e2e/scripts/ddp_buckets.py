"""DDP without holter: a run that goes on, and the same run from its own state at a step, in a new DDP as a resumed process has it.

DDP reduces its first backward pass in buckets laid out by the order of the parameters, and lays them out anew by the order in which gradients came.
gloo adds up the ranks' gradients in an order that depends on where in a bucket an element lies. `--by accelerate` saves and loads by accelerate's own functions.

Prints, on rank 0: the first step whose weights part; and the same where the new DDP has made one backward pass for nothing before the state was loaded.
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, AT, WIDTH = 12, 6, 37

parser = argparse.ArgumentParser()
parser.add_argument("--by", choices=["state_dict", "accelerate"], default="state_dict")
told = parser.parse_args()


class Run:
    """A model that trains; layers are used in another order than they are made in."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("c", "a", "d", "b")})
        self.net: nn.Module = net
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.accelerator = Accelerator() if told.by == "accelerate" else None
        self.optimizer: Any = optimizer
        if self.accelerator is not None:
            self.model, self.optimizer = self.accelerator.prepare(Chain(net), optimizer)
        else:
            self.model = DistributedDataParallel(Chain(net))

    def backward(self, step: int) -> None:
        """Gradients of one step."""
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        self.optimizer.zero_grad()
        (self.model(inputs) - inputs.sin()).square().mean().backward()

    def train(self, steps: range) -> list[list[torch.Tensor]]:
        """Weights after each of these steps."""
        seen = []
        for step in steps:
            self.backward(step)
            self.optimizer.step()
            seen.append([p.detach().clone() for p in self.net.parameters()])
        return seen

    def save(self, folder: Path) -> Any:
        """What `load` takes."""
        if self.accelerator is not None:
            self.accelerator.save_state(str(folder))
            return folder
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict()))

    def load(self, kept: Any) -> None:
        """Go on from there."""
        if self.accelerator is not None:
            self.accelerator.load_state(str(kept))
        else:
            self.net.load_state_dict(copy.deepcopy(kept[0]))
            self.optimizer.load_state_dict(copy.deepcopy(kept[1]))


class Chain(nn.Module):
    """Layers one after the other, by name."""

    def __init__(self, net: nn.ModuleDict) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """From inputs to as many outputs."""
        for name in "abcd":
            inputs = torch.tanh(self.net[name](inputs))
        return inputs


def parted(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> int | None:
    """After how many steps two runs have other bits."""
    for step, (left, right) in enumerate(zip(one, other, strict=True), 1):
        if not all(map(torch.equal, left, right)):
            return step
    return None


dist.init_process_group("gloo")
first = Run()
first.train(range(AT))
holder = [tempfile.mkdtemp()]
dist.broadcast_object_list(holder)
kept = first.save(Path(holder[0]) / "state")
dist.barrier()
goes_on = first.train(range(AT, STEPS))
resumed, warmed = Run(), Run()
resumed.load(kept)
warmed.backward(0)
# The buckets are laid out anew when the next forward pass begins.
warmed.backward(0)
warmed.load(kept)
steps = range(AT, STEPS)
found = {"resumed": parted(goes_on, resumed.train(steps)), "warmed": parted(goes_on, warmed.train(steps))}
if dist.get_rank() == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
del first, resumed, warmed
dist.destroy_process_group()
