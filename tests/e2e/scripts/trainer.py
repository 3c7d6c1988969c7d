"""A Hugging Face Trainer with holter's callback."""

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import holter


class Numbers(Dataset):
    """Noise."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=generator), "labels": torch.randn(2, generator=generator)}


class Model(nn.Module):
    """A layer and its loss, as the Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and output."""
        out = self.layer(x)
        return {"loss": (out - labels).pow(2).mean(), "logits": out}


arguments = TrainingArguments(
    output_dir="out", max_steps=40, per_device_train_batch_size=2, logging_steps=10, report_to=[], use_cpu=True,
    save_strategy="no", disable_tqdm=True,
)  # fmt: skip
Trainer(Model(), arguments, train_dataset=Numbers(), callbacks=[holter.HolterCallback()]).train()
# The Trainer leaves the group to the interpreter's end, where torch now and then aborts, with or without us.
torch.distributed.destroy_process_group()
