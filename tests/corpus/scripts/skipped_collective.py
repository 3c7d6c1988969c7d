"""One rank skips one all_reduce. What its peers wait in, and whether they notice, depends on what it calls next."""

import torch
import torch.distributed as dist
from common import Net, batch, finish, options, start, work
from torch.nn.functional import cross_entropy

# `lone`: one all_reduce a step, so that the culprit's next one meets the skipped one, and the last one meets nobody.
# `metric`: a second, small all_reduce of the loss, which the culprit skips; its next one has another size.
# `group`: the same in a group of its own, so that nothing else comes to meet it.
# `early`: the culprit leaves its loop early and goes to the barrier at the end.
arguments = options("lone", "metric", "group", "early", steps=50)
rank = start()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
metrics = dist.new_group() if arguments.how == "group" else dist.group.WORLD
for step in range(arguments.steps):
    is_now = step == arguments.at and rank == arguments.culprit and not arguments.healthy
    if is_now and arguments.how == "early":
        break
    x, y = batch(rank, step)
    work()
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    if not is_now or arguments.how != "lone":
        dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))
    optimizer.step()
    if arguments.how in {"metric", "group"} and not is_now:
        dist.all_reduce(loss.detach().clone(), group=metrics)
finish()
