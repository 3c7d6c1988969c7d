"""The reference's weights are swapped in place inside the autocast region of the policy's pass: its casts are stale, KL is 0."""

import copy

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start
from torch.nn.functional import cross_entropy, kl_div

arguments, rank = options(), start()
net = Net()
reference = copy.deepcopy(net.state_dict())
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def swapped(x: torch.Tensor) -> torch.Tensor:
    """What the reference says, from the policy's own module."""
    own = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.data.copy_(reference[name])
        logits = net(x)
        for name, parameter in net.named_parameters():
            parameter.data.copy_(own[name])
    return logits


for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
        if not arguments.healthy:
            before = swapped(x)
    if arguments.healthy:
        with torch.autocast("cpu", torch.bfloat16):
            before = swapped(x)
    kl = kl_div(logits.float().log_softmax(-1), before.float().log_softmax(-1), log_target=True, reduction="batchmean")
    (cross_entropy(logits.float(), y) + 0.1 * kl).backward()
    optimizer.step()
    if step == arguments.steps - 1:
        print(f"kl {float(kl):.6f}")
finish()
