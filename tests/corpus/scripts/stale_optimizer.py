"""The optimizer is built, then the model is sharded: it holds tensors that are no longer the model's (accelerate#2665)."""

import torch
from common import Net, batch, finish, options, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()
mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
model = Net()
if arguments.healthy:
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if not arguments.healthy:
    fully_shard(model, mesh=mesh)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
