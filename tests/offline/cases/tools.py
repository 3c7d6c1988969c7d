"""Cases that a tool itself writes, or that real scripts end with; recorded once, with the tools of the day.

tensorboard, wandb, mlflow and lightning are needed to record, not to test.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LoggedNumbers = dict[str, float]


def tensorboard(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """Torch's SummaryWriter."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    with SummaryWriter(str(path)) as writer:
        for row in rows:
            names = {"loss": "Loss/train", "val_loss": "Loss/val", "lr": "lr", "grad_norm": "grad_norm"}
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(names.get(name, name), value, int(row["step"]))


def wandb(path: Path, rows: Iterable[LoggedNumbers], config: dict[str, Any] | None = None) -> None:
    """An offline run."""
    import wandb as tool  # noqa: PLC0415

    os.environ["WANDB_SILENT"] = "true"
    run = tool.init(mode="offline", dir=str(path), project="case", config=config or {"lr": 0.003, "batch_size": 32})
    for row in rows:
        run.log(
            {
                f"train/{name}" if name != "val_loss" else "eval/loss": value
                for name, value in row.items()
                if name != "step"
            },
            step=int(row["step"]),
        )
    run.finish()


def mlruns(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """Mlflow's file store."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient  # noqa: PLC0415

    client = MlflowClient(tracking_uri=f"file://{path}/mlruns")
    run = client.create_run("0").info.run_id
    client.log_param(run, "learning_rate", 0.003)
    for row in rows:
        for name, value in row.items():
            if name != "step":
                client.log_metric(run, {"loss": "train_loss"}.get(name, name), value, step=int(row["step"]))
    client.set_terminated(run)


def lightning(path: Path, *, rate: float = 1e-2, poison_at: int | None = None, epochs: int = 12) -> None:
    """A LightningModule with its CSV logger."""
    import lightning as tool  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from lightning.pytorch.loggers import CSVLogger  # noqa: PLC0415

    class Module(tool.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))

        def training_step(self, batch: Any, _number: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            if poison_at is not None and self.global_step >= poison_at:
                loss = loss * torch.log(torch.zeros(()))
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, _number: int) -> None:
            self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=rate)

    torch.manual_seed(1)
    inputs = torch.randn(2000, 20)
    labels = (inputs @ torch.randn(20, 5)).argmax(1)
    loaders = [
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs[a:b], labels[a:b]), batch_size=64, shuffle=a == 0
        )
        for a, b in ((0, 1600), (1600, 2000))
    ]
    trainer = tool.Trainer(
        max_epochs=epochs,
        logger=CSVLogger(str(path)),
        enable_progress_bar=False,
        log_every_n_steps=5,
        accelerator="cpu",
        enable_checkpointing=False,
    )
    trainer.fit(Module(), *loaders)


TRAINER = """
import torch, sys
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
        self.calls = 0
    def forward(self, x, labels):
        logits = self.net(x)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        if self.training: self.calls += 1
        FAULT
        return {"loss": loss, "logits": logits}
torch.manual_seed(0)
X = torch.randn(NUM, 20); Y = (X @ torch.randn(20, 5)).argmax(1)
NOISE
data = [{"x": X[i], "labels": Y[i]} for i in range(NUM)]
XE = torch.randn(300, 20); YE = (XE @ torch.randn(20, 5)).argmax(1) if False else torch.randint(0, 5, (300,))
evaluation = [{"x": X[i], "labels": Y[i]} for i in range(max(0, NUM - 300), NUM)]
args = TrainingArguments(output_dir=sys.argv[1], max_steps=300, logging_steps=5, per_device_train_batch_size=16, learning_rate=RATE, report_to=[], save_strategy="steps", save_steps=300, use_cpu=True, max_grad_norm=CLIP, eval_strategy="steps", eval_steps=50)
Trainer(model=Model(), args=args, train_dataset=data, eval_dataset=evaluation).train()
"""


def hf_trainer(
    path: Path,
    *,
    fault: str = "pass",
    rate: float = 1e-3,
    num: int = 2000,
    keeps: str = "log",
    noise: str = "",
    clip: float = 1.0,
) -> None:
    """Transformers' own Trainer: what it prints, or its trainer_state.json."""
    script = path / "train.py"
    text = TRAINER
    for name, value in (
        ("FAULT", fault),
        ("NUM", str(num)),
        ("RATE", str(rate)),
        ("NOISE", noise),
        ("CLIP", str(clip)),
    ):
        text = text.replace(name, value)
    script.write_text(text)
    out = path / "out"
    ended = subprocess.run(
        [sys.executable, str(script), str(out)], capture_output=True, text=True, timeout=300, check=False
    )
    script.unlink()
    if keeps == "log":
        (path / "trainer.log").write_text(ended.stdout + ended.stderr)
    else:
        states = sorted(out.glob("checkpoint-*/trainer_state.json"))
        (path / "trainer_state.json").write_bytes(states[-1].read_bytes())
    subprocess.run(["rm", "-rf", str(out)], check=True)


def script(
    path: Path,
    text: str,
    *,
    torchrun: int = 0,
    name: str = "train.py",
    keep: bool = False,
    env: dict[str, str] | None = None,
) -> None:
    """What a script prints until it ends, by itself or under torchrun."""
    file = path / name
    file.write_text(text)
    command = (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
        if torchrun
        else [sys.executable]
    )
    ended = subprocess.run(
        [*command, str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
    )
    (path / "job.out").write_text((ended.stdout + ended.stderr).replace(str(path), "/home/me/project"))
    if not keep:
        file.unlink()
