"""Trains and prints digests of the final weights and of every random state of each rank; knows nothing of holter.

Dropout, batch normalisation, a data loader with workers and shuffling: whatever draws random numbers is here.
"""

import argparse
import contextlib
import hashlib
import pickle
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="plain", choices=["plain", "accumulate", "bf16", "bucket_view"])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--start-method", default=None)
parser.add_argument("--nan-step", type=int, default=-1)
parser.add_argument(
    "--pause", type=float, default=0.0, help="after each step: a run that lasts, and changes no bit by it"
)
options = parser.parse_args()


def main() -> None:
    """Train and print the digest."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002
    inputs = torch.randn(512, 24)
    data = TensorDataset(inputs, inputs[:, :5].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data,
        batch_size=8,
        sampler=sampler,
        num_workers=options.workers,
        multiprocessing_context=options.start_method,
    )
    body = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 5))
    model = DistributedDataParallel(body, gradient_as_bucket_view=options.mode == "bucket_view")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    every = 4 if options.mode == "accumulate" else 1
    step = micro = epoch = 0
    while step < options.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            if step == options.nan_step and rank == 1:
                x[0, 0] = float("inf")
            micro += 1
            is_last = micro % every == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=options.mode == "bf16"):
                    loss = cross_entropy(model(x), y) / every
                loss.backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
                time.sleep(options.pause)
            if step == options.steps:
                break
    digest = hashlib.sha256()
    for name, tensor in body.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    digest.update(pickle.dumps((random.getstate(), np.random.get_state())))  # noqa: NPY002
    print(f"digest of rank {rank}: {digest.hexdigest()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
