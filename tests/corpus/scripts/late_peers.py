"""One rank loops for ever. `late`: its peers come to the collective only seconds later. `receive`: its peer waits in no collective."""

import torch
import torch.distributed as dist
from common import DistributedDataParallel, Net, batch, finish, options, start, work
from torch.nn.functional import cross_entropy


def spin() -> None:
    """A condition that never comes true."""
    tries = 0
    while tries >= 0:
        tries += 1


if __name__ == "__main__":
    arguments = options("late", "receive", steps=60)
    rank = start()
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(arguments.steps):
        is_culprit, is_now = rank == arguments.culprit, step == arguments.at
        x, y = batch(rank, step)
        if is_culprit and is_now and not arguments.healthy:
            spin()
        work(4.0 if is_now and arguments.how == "late" else 0.03)
        if arguments.how == "receive" and is_culprit:
            dist.send(torch.ones(4), dst=1 - rank)
        elif arguments.how == "receive":
            dist.recv(torch.ones(4), src=1 - rank)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    finish()
