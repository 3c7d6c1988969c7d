"""Runs in which ranks wait, and nothing is wrong: `patient_runs.py long_evaluation`. None may raise an alarm."""

import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import DistributedDataParallel, Net, batch, finish, start, work
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer."""
    model = DistributedDataParallel(Net())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """One step of tens of milliseconds."""
    x, y = batch(rank, step)
    work()
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def checkpoint_and_barrier(rank: int) -> None:
    """Rank 0 writes for 3 s every 25 steps while its peers wait in a barrier."""
    model, optimizer = prepared()
    for step in range(80):
        train_step(model, optimizer, rank, step)
        if step % 25 == 24:
            if rank == 0:
                time.sleep(3.0)
            dist.barrier()


def saving_on_one_rank(rank: int) -> None:
    """Rank 0 alone saves, twice as much each time, and takes its time; its peers wait in the next step."""
    model, optimizer = prepared()
    with tempfile.TemporaryDirectory() as folder:
        for step in range(80):
            train_step(model, optimizer, rank, step)
            if step % 20 == 19 and rank == 0:
                ballast = torch.randn(2_000_000 << (step // 20))
                torch.save({"model": model.state_dict(), "ballast": ballast}, Path(folder) / "last.pt")


def evaluation_on_one_rank(rank: int) -> None:
    """Rank 0 alone evaluates for 4 s while its peers wait in a barrier."""
    model, optimizer = prepared()
    for step in range(80):
        train_step(model, optimizer, rank, step)
        if step % 30 == 29:
            if rank == 0:
                evaluate(model.module)
            dist.barrier()


def evaluate(net: nn.Module) -> None:
    """400 batches at leisure."""
    net.eval()
    with torch.no_grad():
        for part in range(400):
            net(batch(0, 10_000 + part)[0])
            time.sleep(0.01)
    net.train()


def long_first_step(rank: int) -> None:
    """The first step takes 8 s: caches, compilers, connections."""
    model, optimizer = prepared()
    for step in range(60):
        if step == 0:
            time.sleep(8.0 if rank == 0 else 7.0)
        train_step(model, optimizer, rank, step)


def jittery_ranks(rank: int) -> None:
    """Each step of each rank takes between 10 and 110 ms; on average they are equal."""
    model, optimizer = prepared()
    dice = random.Random(rank)  # noqa: S311
    for step in range(120):
        time.sleep(0.1 * dice.random())
        train_step(model, optimizer, rank, step)


def equally_slow(rank: int) -> None:
    """From step 40 on, 50 ms more on every rank."""
    model, optimizer = prepared()
    for step in range(120):
        if step >= 40:
            time.sleep(0.05)
        train_step(model, optimizer, rank, step)


def one_pause(rank: int) -> None:
    """One rank does something of its own for 4 s, once: a log to be uploaded."""
    model, optimizer = prepared()
    for step in range(60):
        if step == 30 and rank == 1:
            time.sleep(4.0)
        train_step(model, optimizer, rank, step)


def late_leaver(rank: int) -> None:
    """Rank 0 works for 8 s after the last step; the others have left."""
    model, optimizer = prepared()
    for step in range(60):
        train_step(model, optimizer, rank, step)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        time.sleep(8.0)
    sys.exit(0)


class Samples(Dataset):
    """Noise."""

    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(16, generator=torch.Generator().manual_seed(index)), index % 4


def begin_slowly(worker: int) -> None:
    """A worker that reads an index first."""
    time.sleep(3.0 + worker)


def slow_workers(_: int) -> None:
    """Loader workers that take seconds to start, in each of two epochs."""
    data = Samples()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2, worker_init_fn=begin_slowly)
    model, optimizer = prepared()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            work()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


RUNS = (
    checkpoint_and_barrier, saving_on_one_rank, evaluation_on_one_rank, long_first_step, jittery_ranks, equally_slow, one_pause,
    late_leaver, slow_workers,
)  # fmt: skip

if __name__ == "__main__":
    {run.__name__: run for run in RUNS}[sys.argv[1]](start())
    finish()
