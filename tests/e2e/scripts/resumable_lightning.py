"""PyTorch Lightning on two ranks, halted by a NaN and gone on with from what a halt saved: `resumable_lightning.py OUT STEPS [--nan STEP] [--resume CHECKPOINT]`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import lightning
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, IterableDataset

import holter

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--nan", type=int, default=-1)
parser.add_argument("--resume", default="")
parser.add_argument("--clip", type=float, default=None)
options = parser.parse_args()


class Batches(IterableDataset):
    """Each rank's own, the same in every run; from `first` on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rank = torch.distributed.get_rank()
        draw = torch.Generator().manual_seed(7 + rank)
        for step in range(options.steps):
            x = torch.randn(8, 8, generator=draw)
            if step == options.nan and rank == 1:
                x[0, 0] = float("nan")
            if step >= self.first:
                yield x, x[:, :1].sin()


class Sine(lightning.LightningModule):
    """Learns points of a sine, and drops some out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """The loss."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.body(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class GoesOn(lightning.Callback):
    """From a halt's checkpoint."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:  # noqa: ARG002
        """Weights and optimizer by torch's own functions, then what is this rank's alone."""
        model, optimizer = trainer.strategy.model, trainer.optimizers[0]
        weights, optim = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": optim}
        dcp.load(state, checkpoint_id=options.resume)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        holter.restore(options.resume, model)


lightning.seed_everything(1234)
first = int(Path(options.resume).parent.name) if options.resume else 0
trainer = lightning.Trainer(
    max_steps=options.steps - first,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    gradient_clip_val=options.clip,
    callbacks=[GoesOn()] if options.resume else [],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
model = Sine()
trainer.fit(model, DataLoader(Batches(first), batch_size=None))
torch.save(model.state_dict(), options.out.with_name(f"{options.out.name}-{trainer.global_rank}.pt"))
