"""PyTorch Lightning on made-up numbers, with a callback that asks for holter once model and optimizer are there.

    torchrun --standalone --nproc-per-node 2 deploy/examples/train_lightning.py

With `-m holter` before the script the callback is not needed.
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holter


class Holter(lightning.Callback):
    """Watches from the first step on."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:  # noqa: ARG002
        """The strategy's model is the one that is wrapped."""
        holter.watch(trainer.strategy.model, trainer.optimizers[0])


class Sine(lightning.LightningModule):
    """Learns points of a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """The loss."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.body(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    lightning.seed_everything(1234)
    x = torch.randn(2048, 8)
    loader = DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=8, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[Holter()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Sine(), loader)


if __name__ == "__main__":
    main()
