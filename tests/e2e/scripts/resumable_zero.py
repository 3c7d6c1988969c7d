"""ZeRO through accelerate, on the CPU, which can be faulted at a step and resumed from a checkpoint.

Dropout, clipping, two micro-batches a step, a scheduler called at each of them, and two parameter groups, so that ZeRO steps the optimizer
inside it twice a step. Each rank writes `<out>-<rank>.json`: the loss of every micro-batch; the first also the final weights, bit for bit.
"""

import argparse
import json
import time
from pathlib import Path

import deepspeed.ops
import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import nn

# Compiled at first use for a minute, and used by inference alone.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

EVERY = 2

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--stage", type=int, required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--dtype", choices=["no", "bf16", "fp16"], default="no")
parser.add_argument("--nan-rank", type=int, default=-1, help="whose batch is spoiled")
parser.add_argument("--nan-step", type=int, default=-1, help="completed steps when it is")
parser.add_argument("--patient", action="store_true", help="after the second step wait for an operator between steps")
parser.add_argument("--resume", type=Path, default=None)
arguments = parser.parse_args()

plugin = DeepSpeedPlugin(
    zero_stage=arguments.stage,
    gradient_accumulation_steps=EVERY,
    gradient_clipping=1.0,
    zero3_save_16bit_model=True,
)
accelerator = Accelerator(
    mixed_precision=arguments.dtype,
    gradient_accumulation_steps=EVERY,
    deepspeed_plugin=plugin,
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
)
rank = accelerator.process_index
# There is no loader to tell it from.
plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
set_seed(7)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
set_seed(100 + rank)
if arguments.resume:
    accelerator.load_state(arguments.resume)

losses: dict[str, str] = {}
for step in range(model.global_steps, arguments.steps):
    for part in range(EVERY):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + 10 * part + rank))
        if rank == arguments.nan_rank and step == arguments.nan_step:
            x[0, 0] = float("nan")
        with accelerator.accumulate(model):
            x = x.to(next(model.parameters()).dtype)
            loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses[f"{step}.{part}"] = loss.item().hex()
    print(f"rank {rank}: {step + 1} steps", flush=True)
    time.sleep(1.0 if arguments.patient and step > 1 else 0.0)

# All ranks take part in ZeRO-3's gathering; the first has the result.
weights = {name: value.tolist() for name, value in (accelerator.get_state_dict(model) or {}).items()}
arguments.out.with_name(f"{arguments.out.name}-{rank}.json").write_text(
    json.dumps({"losses": losses, "weights": weights, "rates": scheduler.get_last_lr()})
)
accelerator.end_training()
