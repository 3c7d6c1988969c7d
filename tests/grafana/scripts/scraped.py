"""A training slow enough to be scraped: rank 1 comes late for a while, a checkpoint is saved, then rank 1's batch holds a NaN."""

import argparse
import itertools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--step-s", type=float, default=0.04)
parser.add_argument(
    "--late", type=int, nargs=2, default=(0, 0), help="rank 1 takes three times as long from step to step"
)
parser.add_argument("--save-at", type=int, default=-1)
parser.add_argument("--nan-at", type=int, default=-1)
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(7)
rank = dist.get_rank()


def nap(share: float) -> None:
    """A share of a step; three times as long where this rank is to be late."""
    is_late = rank == 1 and options.late[0] <= step < options.late[1]
    time.sleep(options.step_s * share * (3 if is_late else 1))


class Batches(IterableDataset):
    """For ever: whoever watches ends it."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in itertools.count():
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * number + rank))
            nap(0.15)
            yield x, x[:, :4].argmax(dim=1)


net = nn.Sequential()
net.embed = nn.Linear(16, 64)
for index in range(3):
    net.add_module(f"block_{index}", nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
net.head = nn.Linear(64, 4)
net.block_1.register_forward_hook(lambda *_: nap(0.4))
net.block_1.register_full_backward_hook(lambda *_: nap(0.35))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
step = 0
for step, (x, y) in enumerate(DataLoader(Batches(), batch_size=None)):
    if step == options.nan_at and rank == 1:
        x[2, 3] = float("nan")
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    if step == options.save_at:
        checkpoint.save(net.state_dict(), checkpoint_id=f"checkpoint-{step}")
    nap(0.1)
