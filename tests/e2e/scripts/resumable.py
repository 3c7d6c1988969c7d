"""An accelerate loop with all that makes resuming hard, which can be faulted at a step and resumed from a checkpoint.

Dropout, BatchNorm, clipping, two micro-batches a step, a scheduler called at each of them, a shuffled loader with its own generator, or
a plain one, whose iterator draws its seed from the generator of the dropout.
Each rank writes `<out>-<rank>.json`: the loss of every micro-batch by its number, and the final weights, bit for bit.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holter.testing

EVERY = 2
MICRO_BATCHES = 14
"""Of an epoch: step 30 is within one."""
FAULTS = {
    "suspend": holter.testing.suspend,
    "spin": holter.testing.spin,
    "lock": lambda: holter.testing.hold_interpreter_lock(600),
    "kill": holter.testing.kill,
}

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--fault", choices=["", "nan", *FAULTS], default="")
parser.add_argument("--rank", type=int, default=1, help="that has the fault")
parser.add_argument("--at", type=int, default=30, help="completed steps when it happens")
parser.add_argument("--resume", type=Path, default=None)
parser.add_argument("--plain", action="store_true", help="the loader has no generator: accelerate's sampler is seeded")
parser.add_argument("--completed", type=int, default=0, help="steps in that checkpoint")
arguments = parser.parse_args()

config = DataLoaderConfiguration(use_seedable_sampler=arguments.plain)
accelerator = Accelerator(gradient_accumulation_steps=EVERY, dataloader_config=config)
rank = accelerator.process_index
set_seed(7)
shuffling = torch.Generator()
data = torch.randn(4 * MICRO_BATCHES * accelerator.num_processes, 16, generator=torch.Generator().manual_seed(3))
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=2 * arguments.steps)
dataset, generator = TensorDataset(data, data[:, :1].sin()), None if arguments.plain else shuffling
loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
set_seed(100 + rank)
if arguments.resume:
    accelerator.load_state(arguments.resume)

losses: dict[int, str] = {}
epoch, micro = divmod(arguments.completed * EVERY, MICRO_BATCHES)
skipped, micro = micro, arguments.completed * EVERY
while micro < arguments.steps * EVERY:
    shuffling.manual_seed(1000 + epoch)
    loader.set_epoch(epoch)
    for x, y in skip_first_batches(loader, skipped) if skipped else loader:
        if arguments.fault and rank == arguments.rank and micro == arguments.at * EVERY + 1:
            print(f"fault at {time.time()}", flush=True)
            if arguments.fault == "nan":
                x = x * float("nan")  # noqa: PLW2901
            else:
                FAULTS[arguments.fault]()
        with accelerator.accumulate(model):
            noise = random.random() + float(np.random.rand())  # noqa: NPY002, S311  what a user's script draws
            loss = nn.functional.mse_loss(model(x), y) * (1 + 0.01 * noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses[micro] = loss.item().hex()
        micro += 1
        if micro >= arguments.steps * EVERY:
            break
    epoch, skipped = epoch + 1, 0

weights = {name: value.tolist() for name, value in accelerator.unwrap_model(model).state_dict().items()}
rates = scheduler.get_last_lr()
arguments.out.with_name(f"{arguments.out.name}-{rank}.json").write_text(
    json.dumps({"losses": losses, "weights": weights, "rates": rates})
)
accelerator.end_training()
