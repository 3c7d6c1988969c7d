"""Pure bf16 weights under AdamW with lr 1e-5: nearly every update is rounded away (torchao#1124). The twin is fp32."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
dtype = torch.float32 if arguments.healthy else torch.bfloat16
model = DistributedDataParallel(Net(width=64).to(dtype))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x.to(dtype)), y).backward()
    optimizer.step()
finish()
