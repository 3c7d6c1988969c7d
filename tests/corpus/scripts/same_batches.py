"""No sampler: both ranks read the same batches (ray#64315)."""

import torch
from common import DistributedDataParallel, Net, finish, options, start
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

arguments, rank = options(), start()
data = TensorDataset(torch.randn(240, 16), torch.randint(4, (240,)))
sampler = DistributedSampler(data) if arguments.healthy else None
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
finish()
