"""Four ranks as two by two: rows add up activations, columns add up gradients; one rank loops for ever between the two."""

import torch
import torch.distributed as dist
from common import Net, batch, finish, options, start, work
from torch.nn.functional import cross_entropy

# `loop`: the culprit never comes to its row's collective. `skip`: it leaves one out in its row and goes on to its column.
arguments = options("loop", "skip", steps=60)
rank = start()
rows = [dist.new_group([0, 1], group_desc="row"), dist.new_group([2, 3], group_desc="row")]
columns = [dist.new_group([0, 2], group_desc="column"), dist.new_group([1, 3], group_desc="column")]
row, column = rows[rank // 2], columns[rank % 2]


def wait_for_nothing() -> None:
    """A condition that never comes true."""
    while rank >= 0:
        pass


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    is_now = step == arguments.at and rank == arguments.culprit and not arguments.healthy
    x, y = batch(rank, step)
    work()
    if is_now and arguments.how == "loop":
        wait_for_nothing()
    if not (is_now and arguments.how == "skip"):
        dist.all_reduce(x, group=row)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    for group in (row, column):
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) / 2
        dist.all_reduce(flat, group=group)
        for parameter, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad.copy_(part.view_as(parameter))
    optimizer.step()
finish()
