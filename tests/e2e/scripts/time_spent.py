"""A loop whose time is known: naps in the loader, in a save, of one rank in its own code, and a halt, each written down for the test.

Each rank writes `<out>-<rank>.json`: seconds by what it did. Goes on from `--resume`, a state of holter's own format of a loop.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--nap", type=float, default=0.0, help="seconds of the loader of rank 1 at step 30")
parser.add_argument("--save", type=float, default=0.0, help="seconds that rank 0's save at step 35 takes")
parser.add_argument(
    "--hang", type=float, default=0.0, help="seconds for which rank 1 stands still in its own code at step 40"
)
parser.add_argument("--late", type=float, default=0.0, help="seconds by which rank 1 comes late from step 45 on")
parser.add_argument("--setup", type=float, default=0.0, help="seconds before the first step")
arguments = parser.parse_args()


class Numbers(IterableDataset):
    """Batches, one of which takes its time on rank 1."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(5 + dist.get_rank())
        for step in range(arguments.steps):
            if step == 30 and dist.get_rank() == 1:
                time.sleep(arguments.nap)
            x = torch.randn(16, generator=generator)
            yield x, x[:4].sin()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
time.sleep(arguments.setup)


class Slow:
    """Takes its time to be saved."""

    def __reduce__(self) -> tuple[object, ...]:
        time.sleep(arguments.save)
        return (dict, ())


began = time.perf_counter()
for step, (x, y) in enumerate(DataLoader(Numbers(), batch_size=None)):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    time.sleep(0.05)
    if rank == 1 and step == 40:
        time.sleep(arguments.hang)
    if rank == 1 and step >= 45:
        time.sleep(arguments.late)
    loss.backward()
    optimizer.step()
    if rank == 0 and step == 35 and arguments.save:
        torch.save({"model": net.state_dict(), "slow": Slow()}, arguments.out.with_suffix(".pt"))
arguments.out.with_name(f"{arguments.out.name}-{rank}.json").write_text(
    json.dumps({"loop_s": time.perf_counter() - began})
)
dist.barrier()
dist.destroy_process_group()
