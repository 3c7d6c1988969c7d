"""Logs a loss and a rate three times by a real tracker, offline: `logs_with.py wandb module`; prints what a monitor heard."""

import json
import sys
from collections.abc import Callable
from typing import Any

from tests.frameworks.test_loggers import Rank


def to_wandb(how: str) -> Callable[[dict[str, float]], Any]:
    import wandb  # noqa: PLC0415 - each script has its own

    run = wandb.init(project="p", mode="offline")
    return lambda values: wandb.log(values) if how == "module" else run.log(values)


def to_mlflow(how: str) -> Callable[[dict[str, float]], Any]:
    import mlflow  # noqa: PLC0415

    run = mlflow.start_run()
    if how == "module":
        return mlflow.log_metrics
    from mlflow.entities import Metric  # noqa: PLC0415

    client = mlflow.MlflowClient()
    return lambda values: client.log_batch(
        run.info.run_id, [Metric(name, value, 0, 0) for name, value in values.items()]
    )


def to_tensorboard(how: str) -> Callable[[dict[str, float]], Any]:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    writer = SummaryWriter("board")
    if how == "scalars":
        return lambda values: writer.add_scalars("train", values)
    return lambda values: [writer.add_scalar(name, value) for name, value in values.items()]


def to_trackio(how: str) -> Callable[[dict[str, float]], Any]:
    import trackio  # noqa: PLC0415

    run = trackio.init(project="p")
    return lambda values: trackio.log(values) if how == "module" else run.log(values)


library, how = sys.argv[1:]
rank = Rank()
rank.train()
log = {"wandb": to_wandb, "mlflow": to_mlflow, "tensorboard": to_tensorboard, "trackio": to_trackio}[library](how)
for number in range(3):
    rank.train()
    log({"loss": 1.5 - number / 4, "lr": 1e-3})
rank.train()
print("heard", json.dumps(rank.said()), flush=True)
