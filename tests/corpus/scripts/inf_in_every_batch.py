"""A loss scaler meets an Inf in every batch: its scale falls from 65536 to 0.06 and each step is skipped (lightning#450)."""

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    if not arguments.healthy or step < 2:
        x[0, 0] = float("inf")
    optimizer.zero_grad()
    scaler.scale(cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
finish()
