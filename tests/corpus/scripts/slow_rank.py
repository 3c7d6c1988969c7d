"""One rank is 50 ms slower than its peers in each step: in its forward pass, its backward pass, or its data loader (traceml#252)."""

import time

import torch
from common import DistributedDataParallel, Net, finish, options, start, work
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SLOWER_S = 0.05
arguments = options("forward", "backward", "data", steps=150)


class Samples(Dataset):
    """Noise; a sample may take its time."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.randn(16, generator=torch.Generator().manual_seed(index)), index % 4


if __name__ == "__main__":
    rank = start()
    slow = "" if arguments.healthy or rank != arguments.culprit else arguments.how
    data = Samples(8 * arguments.steps * torch.distributed.get_world_size(), SLOWER_S / 8 if slow == "data" else 0.0)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    net = Net()
    model = DistributedDataParallel(net)
    if slow == "forward":
        net.block.register_forward_hook(lambda *_: time.sleep(SLOWER_S))
    if slow == "backward":
        net.block.register_full_backward_hook(lambda *_: time.sleep(SLOWER_S))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in loader:
        work(0.02)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    finish()
