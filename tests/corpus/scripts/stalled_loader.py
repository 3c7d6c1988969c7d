"""One rank's data set never gives one of its samples: a read that hangs."""

import threading

import torch
from common import DistributedDataParallel, Net, finish, options, start, work
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

arguments = options("here", "in_worker", steps=60)


class Stalling(Dataset):
    """Samples of noise; the culprit waits for one of them for ever."""

    def __init__(self, size: int, stalled: int) -> None:
        self.size, self.stalled = size, stalled

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.stalled:
            threading.Event().wait()
        return torch.randn(16, generator=torch.Generator().manual_seed(index)), index % 4


if __name__ == "__main__":
    rank = start()
    world_size = torch.distributed.get_world_size()
    size = 8 * arguments.steps * world_size
    stalled = 8 * arguments.at * world_size + arguments.culprit
    data = Stalling(size, -1 if arguments.healthy else stalled)
    sampler = DistributedSampler(data, shuffle=False)
    workers = 1 if arguments.how == "in_worker" else 0
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=workers)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in loader:
        work()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    finish()
