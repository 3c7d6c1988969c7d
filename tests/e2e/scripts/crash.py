"""Trains a little, then ends in a way that no exception tells of. `--rank` is the one that does it."""

import argparse
import ctypes
import faulthandler
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=["abort", "fault", "exit", "mismatch", "nothing"])
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--faulthandler", action="store_true")
parser.add_argument("--wait-for", type=Path, help="crash when this file is there")
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if options.faulthandler:
    faulthandler.enable()
for _ in range(40):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(0.03)  # long enough for a copy before the end
time.sleep(0.5)  # gloo's thread writes that the last call is over
print("ready", flush=True)
while options.wait_for and not options.wait_for.exists():
    time.sleep(0.01)
if options.wait_for:
    print(f"crash at {time.time()}", flush=True)
if options.how == "mismatch":
    dist.all_reduce(torch.ones(200 if rank == options.rank else 100))
elif rank != options.rank:
    dist.all_reduce(torch.ones(3))
elif options.how == "abort":
    os.abort()
elif options.how == "fault":
    ctypes.string_at(0)
elif options.how == "exit":
    os._exit(41)
dist.barrier()
dist.destroy_process_group()
sys.exit(0)
