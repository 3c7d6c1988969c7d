"""A job as a user of GPUs writes it: NCCL, a device a rank, DDP or `fully_shard`, a fused optimizer. It knows nothing of the tests' device."""

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(model, device_ids=[rank])
else:
    for layer in (model[0], model[2], model):
        fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
for step in range(10):
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank)).cuda()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
whole = [parameter.full_tensor() if sys.argv[1] == "fsdp" else parameter for parameter in model.parameters()]
digest = hashlib.sha256(b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in whole)).hexdigest()
print(json.dumps({"device": str(batch.device), "weights": digest, "loss": loss.item()}), flush=True)
dist.destroy_process_group()
