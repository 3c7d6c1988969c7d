"""A DistributedSampler, and accelerate's prepare() shards again: half of the data is never seen (accelerate#4199)."""

import torch
from accelerate import Accelerator
from common import Net, options
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

arguments = options()
accelerator = Accelerator(cpu=True)
torch.manual_seed(7)
data = TensorDataset(torch.randn(320, 16), torch.randint(4, (320,)))
sampler = None if arguments.healthy else DistributedSampler(data, accelerator.num_processes, accelerator.process_index)
loader = DataLoader(data, batch_size=8, sampler=sampler, shuffle=arguments.healthy)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2 if arguments.healthy else 3):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()
accelerator.end_training()
