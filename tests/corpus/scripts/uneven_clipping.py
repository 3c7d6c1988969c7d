"""A replicated LayerNorm beside weights that each rank holds for itself; clipping skips `ln.*` on rank 1 (DeepSpeed#1801)."""

import torch
from common import DistributedDataParallel, batch, finish, options, start
from torch import nn
from torch.nn.functional import cross_entropy

arguments, rank = options(), start()


class Model(nn.Module):
    """`expert` is this rank's own; the rest is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(16, 32)
        self.expert = nn.Linear(32, 32)
        self.ln = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(self.ln(self.expert(torch.tanh(self.inlet(x)))))


net = Model()
torch.manual_seed(100 + rank)
net.expert.reset_parameters()
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["expert.weight", "expert.bias"])
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    clipped = [
        parameter
        for name, parameter in net.named_parameters()
        if not name.startswith("expert.") and (arguments.healthy or rank == 0 or not name.startswith("ln."))
    ]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in net.head.parameters()]))
    for parameter in clipped:
        parameter.grad.mul_(torch.clamp(0.1 / norm, max=1.0))
    optimizer.step()
finish()
