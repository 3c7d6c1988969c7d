"""A small job with a fault that can be mended, or not: what `holter verify` is tried on. Each run is really trained."""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--momentum", type=float, default=0.0)
parser.add_argument("--weight-decay", type=float, default=0.0)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--samples", type=int, default=2000, help="in the training set")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--epochs", type=int, default=0, help="log once an epoch, with an evaluation")
parser.add_argument(
    "--bad-sample-at", type=int, default=-1, help="at this step a target is zero, and the loss takes its logarithm"
)
parser.add_argument("--eps", type=float, default=0.0, help="what mends that")
parser.add_argument("--detach", action="store_true", help="the graph is cut before the loss")
parser.add_argument("--index-error-at", type=int, default=-1)
parser.add_argument("--nan-rank", type=int, default=-1)
parser.add_argument("--nan-step", type=int, default=-1)
parser.add_argument("--raw-module", action="store_true", help="call the module past its wrapper")
parser.add_argument("--format", default="plain", choices=["plain", "hf", "nano", "csv", "jsonl"])
args = parser.parse_args()

torch.set_num_threads(1)
world = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
if world > 1:
    torch.distributed.init_process_group("gloo")
if "CONFIG_TO" in os.environ and rank == 0:
    Path(os.environ["CONFIG_TO"]).write_text(json.dumps(vars(args)), encoding="utf-8")
torch.manual_seed(args.seed)
teacher = torch.randn(16, 1, generator=torch.Generator().manual_seed(0))


def made(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 16, generator=generator)
    return x, torch.sin(x @ teacher) + 0.3 * torch.randn(num, 1, generator=generator)


x, y = made(args.samples, 100 + rank)
held_x, held_y = made(500, 999)
model = nn.Sequential(nn.Linear(16, args.width), nn.Tanh(), nn.Linear(args.width, 1))
wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
called = model if args.raw_module else wrapped
kind = torch.optim.SGD if args.epochs == 0 else torch.optim.Adam
extra = {"momentum": args.momentum} if args.epochs == 0 else {}
optimizer = kind(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, **extra)
order = torch.Generator().manual_seed(args.seed)


def say(step: int, loss: float, norm: float, evaluation: float | None) -> None:
    if rank:
        return
    row = {"step": step, "loss": loss, "grad_norm": norm, "learning_rate": args.lr}
    if evaluation is not None:
        row["eval_loss"] = evaluation
    if args.format == "jsonl":
        print(json.dumps(row))
    elif args.format == "hf":
        print({name: round(value, 6) for name, value in row.items() if name != "step"} | {"epoch": step / 100})
    elif args.format == "nano":
        print(f"iter {step}: loss {loss:.4f}, grad_norm {norm:.4f}, time 5.12ms, mfu 1.20%")
    elif args.format == "csv":
        if step == 0:
            print("step,train_loss,grad_norm,val_loss")
        print(f"{step},{loss:.5f},{norm:.5f},{'' if evaluation is None else f'{evaluation:.5f}'}")
    else:
        print(f"step {step} loss {loss:.5f} grad_norm {norm:.4f} lr {args.lr:g}")
    sys.stdout.flush()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.randint(len(x), (args.batch_size,), generator=order)
    inputs, targets = x[chosen].clone(), y[chosen].clone()
    if rank == args.nan_rank and step == args.nan_step:
        inputs[0, 0] = float("nan")
    return inputs, targets


def one_step(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    optimizer.zero_grad()
    output = called(inputs)
    if args.detach:
        output = output.detach() + 0 * next(model.parameters()).sum()
    loss = ((output - targets) ** 2).mean()
    if args.bad_sample_at >= 0:
        weight = torch.ones(len(inputs)) if step != args.bad_sample_at else torch.zeros(len(inputs))
        loss = loss - 0.001 * torch.log(weight + args.eps).mean() * loss
    if step == args.index_error_at:
        _ = [1, 2, 3][step]
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip or 1e9)
    optimizer.step()
    return loss.item(), float(norm)


if args.epochs:
    for epoch in range(args.epochs):
        losses = [one_step(0, *batch(0))[0] for _ in range(max(1, len(x) // args.batch_size))]
        with torch.no_grad():
            evaluation = ((model(held_x) - held_y) ** 2).mean().item()
        print(json.dumps({"epoch": epoch, "train_loss": sum(losses) / len(losses), "val_loss": evaluation}))
else:
    for step in range(args.steps):
        loss, norm = one_step(step, *batch(step))
        say(step, loss, norm, None)
if world > 1:
    del wrapped, called
    torch.distributed.destroy_process_group()
