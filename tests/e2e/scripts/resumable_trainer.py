"""A Hugging Face Trainer with dropout and BatchNorm, which can be given a NaN at a step and resumed from a checkpoint.

Each rank writes `<out>-<rank>.json`: the loss of every micro-batch by its number, and the final weights, bit for bit.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import holter.testing

EVERY = 2
FAULTS = {"spin": holter.testing.spin, "suspend": holter.testing.suspend, "kill": holter.testing.kill}

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--fault", choices=["", "nan", *FAULTS], default="")
parser.add_argument("--rank", type=int, default=0, help="that has the fault")
parser.add_argument("--at", type=int, default=20, help="completed steps when it happens")
parser.add_argument("--resume", default=None)
parser.add_argument("--save-steps", type=int, default=0)
given = parser.parse_args()


class Numbers(Dataset):
    """Noise; eight steps an epoch on two ranks, sixteen on one."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x[:2].sin()}


class Model(nn.Module):
    """As the Trainer expects one: it makes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and output."""
        out = self.body(x)
        return {"loss": (out - labels).pow(2).mean(), "logits": out}


class Training(Trainer):
    """Remembers every loss; has the fault."""

    losses: dict[int, str] = {}  # noqa: RUF012

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> torch.Tensor:
        """One micro-batch."""
        step, is_second = self.state.global_step, self.state.global_step * EVERY in self.losses
        if given.fault and is_second and step == given.at and self.args.process_index == given.rank:
            print(f"fault at {time.time()}", flush=True)
            if given.fault == "nan":
                inputs = inputs | {"x": inputs["x"] * float("nan")}
            else:
                FAULTS[given.fault]()
        loss = super().training_step(model, inputs, *args)
        self.losses[step * EVERY + is_second] = loss.item().hex()
        return loss


torch.manual_seed(7)
saving = {"save_strategy": "steps", "save_steps": given.save_steps} if given.save_steps else {"save_strategy": "no"}
arguments = TrainingArguments(
    output_dir=str(given.out.with_name(f"{given.out.name}-checkpoints")), max_steps=given.steps, use_cpu=True, report_to=[],
    per_device_train_batch_size=2, gradient_accumulation_steps=EVERY, learning_rate=0.01, warmup_steps=3,
    logging_steps=1, logging_nan_inf_filter=True, disable_tqdm=True, **saving,
)  # fmt: skip
trainer = Training(Model(), arguments, train_dataset=Numbers())
trainer.train(resume_from_checkpoint=given.resume)
weights = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
rank = arguments.process_index
given.out.with_name(f"{given.out.name}-{rank}.json").write_text(
    json.dumps({"losses": trainer.losses, "weights": weights, "rates": trainer.lr_scheduler.get_last_lr()})
)
if torch.distributed.is_initialized():
    # The Trainer leaves the group to the interpreter's end, where torch now and then aborts, with or without us.
    torch.distributed.destroy_process_group()
