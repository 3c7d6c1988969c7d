"""`ddp.double(); ddp.float()` replaces the parameters and loses DDP's hooks: gradients are never reduced (pytorch#104336)."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch.nn.functional import cross_entropy

torch.__future__.set_overwrite_module_params_on_conversion(True)
arguments, rank = options(), start()
model = DistributedDataParallel(Net())
if not arguments.healthy:
    model.double()
    model.float()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
