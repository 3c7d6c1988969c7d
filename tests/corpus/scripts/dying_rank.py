"""Rank 1 ends at step 20, in the way that the argument says; its peers wait in the next collective."""

import argparse
import os
import signal

import torch
from common import DistributedDataParallel, Net, batch, finish, start
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=["kill", "exception", "exit", "all_raise", "end"])
how = parser.parse_args().how
rank = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(40):
    if step == 20 and rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 20 and rank == 1 and how == "exception":
        raise KeyError("sample-17")
    if step == 20 and rank == 1 and how == "exit":
        os._exit(7)
    if step == 20 and how == "all_raise":
        raise RuntimeError("out of ideas")
    x, y = batch(rank, step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
finish()
