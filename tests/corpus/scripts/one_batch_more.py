"""Rank 1 has one batch more than rank 0, which would hang at the end (pytorch#158719); here the ranks then part in peace."""

import torch
from common import DistributedDataParallel, Net, options, start
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

arguments, rank = options(), start()
generator = torch.Generator().manual_seed(rank)
size = 8 * 40 + (8 if rank == 1 and not arguments.healthy else 0)
data = TensorDataset(torch.randn(size, 16, generator=generator), torch.randint(4, (size,), generator=generator))
loader = DataLoader(data, batch_size=8, shuffle=True)
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(loader):
    if step == 38:  # a run as short as this one must not end in the hang that it foretells
        break
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
