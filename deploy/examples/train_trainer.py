"""A Hugging Face Trainer on made-up numbers, with holter's callback.

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no \
        --dynamo_backend no --main_process_port 0 deploy/examples/train_trainer.py

With `-m holter` before the script the callback is not needed. `--resume DIRECTORY` goes on from a checkpoint of the Trainer's or of a halt's.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import holter


class Numbers(Dataset):
    """Points of a sine."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x[:1].sin()}


class Model(nn.Module):
    """As the Trainer expects one: it makes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and output."""
        out = self.body(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", default=None, help="directory of a checkpoint to go on from")
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir="trainer-checkpoints",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=Numbers(), callbacks=[holter.HolterCallback()])
    trainer.train(resume_from_checkpoint=options.resume)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
