"""The script of the doctor's jobs: a few steps of a small model, as a user writes them, with a fault if one is asked for.

python -m holter job_script.py --steps 8 --fault nan --at 5 --optimizer fused
torchrun --nproc-per-node 2 -m holter job_script.py --fault skip --at 5
"""

import argparse
import os
import signal
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32
FAULTY_RANK = 1


def parse() -> argparse.Namespace:
    """Return the options that say how to train and with which fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--fault", choices=["none", "nan", "skip", "stop", "kill"], default="none")
    parser.add_argument("--at", type=int, default=5)
    parser.add_argument("--optimizer", choices=["fused", "foreach"], default="fused")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--save", default="")
    return parser.parse_args()


def build(args: argparse.Namespace, *, is_distributed: bool) -> nn.Module:
    """Return the model, wrapped as the options say."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).cuda()
    if not is_distributed:
        return model
    if args.sharded:
        fully_shard(model)
        return model
    return DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])


def train(args: argparse.Namespace, model: nn.Module, rank: int, num_ranks: int) -> None:
    """Run the training loop, with the fault if one is asked for."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{args.optimizer: True})
    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        inputs = torch.randn(8, WIDTH, generator=generator).cuda()
        is_here = step == args.at and rank == FAULTY_RANK % num_ranks
        if is_here and args.fault == "nan":
            inputs[0, 0] = torch.nan
        if is_here and args.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_here and args.fault == "stop":
            threading.Event().wait()
        loss = model(inputs).square().mean()
        loss.backward()
        if num_ranks > 1:
            shown = loss.detach().clone()
            if not (is_here and args.fault == "skip"):
                dist.all_reduce(shown)
            shown.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()


def main() -> None:
    """Train, and save the weights if a path is given."""
    args = parse()
    rank, num_ranks = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if num_ranks > 1:
        dist.init_process_group("nccl")
    model = build(args, is_distributed=num_ranks > 1)
    train(args, model, rank, num_ranks)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    torch.cuda.synchronize()
    if args.save and rank == 0:
        torch.save([tensor.cpu() for tensor in whole], args.save)
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
