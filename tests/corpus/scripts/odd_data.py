"""Data that is not what it should be: the evaluation is trained on, one rank's inputs are scaled otherwise since a step."""

import torch
from common import DistributedDataParallel, Net, finish, options, start
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

arguments, rank = options("leaked", "shifted"), start()
is_faulty = not arguments.healthy
data = TensorDataset(torch.randn(400, 16), torch.randint(4, (400,)))
held_out = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
trained = ConcatDataset([data, Subset(held_out, range(32))]) if is_faulty and arguments.how == "leaked" else data
sampler = DistributedSampler(trained)
loader, evaluation = DataLoader(trained, batch_size=16, sampler=sampler), DataLoader(held_out, batch_size=32)
net = Net()
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = 0
for epoch in range(6):
    sampler.set_epoch(epoch)
    for x, y in loader:
        if is_faulty and arguments.how == "shifted" and rank == arguments.culprit and step >= arguments.at:
            x = 4 * x  # noqa: PLW2901  as a normalisation that is left out would
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
    net.eval()
    with torch.no_grad():
        for x, _ in evaluation:
            net(x)
    net.train()
finish()
