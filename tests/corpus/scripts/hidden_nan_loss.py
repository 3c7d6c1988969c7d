"""HF Trainer: from step 30 the loss is NaN, and the log goes on showing a plausible number (`logging_nan_inf_filter`)."""

import tempfile

import torch
from common import Net, options
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

arguments = options()


class Samples(Dataset):
    """Made-up numbers with made-up labels."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(16, generator=generator),
            "labels": torch.randint(4, (), generator=generator),
        }


class Classifier(Net):
    """In the form that the Trainer calls."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and logits."""
        logits = super().forward(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Faulty(Trainer):
    """Adds a term of monitoring to the loss, which is 0/0 from step 30 on."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        """The model's loss, and the term."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.state.global_step >= 30 and not arguments.healthy and not kwargs.get("return_outputs"):
            loss = loss + torch.zeros(()) / torch.zeros(())
        return loss


torch.manual_seed(7)
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    Faulty(model=Classifier(), args=settings, train_dataset=Samples()).train()
