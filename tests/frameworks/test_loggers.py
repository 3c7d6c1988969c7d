"""Logs of frameworks and trackers are read once the script has imported them, and the outermost counts."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

from holter.frameworks.all import ALL
from holter.frameworks.loggers import Loggers
from holter.page import PageReader, PageWriter
from holter.rank.context import ObservationWriter
from holter.rank.monitor import Monitor
from holter.records import Logged, Observation


class Rank:
    """A monitor in this process, with the loggers on."""

    def __init__(self) -> None:
        self.page = PageWriter.create(rank=0, world_size=1, pid=1, started_ticks=1, ring_bytes=1 << 20)
        self.reader = PageReader.open(self.page.fd)
        self.monitor = Monitor(ObservationWriter(self.page, 0), world_size=1, budget=1e9, floor_s=0.0, frameworks=ALL)
        self.monitor.install()
        Loggers(self.monitor).install()

    def train(self) -> None:
        """One backward pass: the moment at which loggers are looked for."""
        nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()

    def said(self) -> list[dict[str, float]]:
        observations = [msgspec.msgpack.decode(payload, type=Observation) for payload in self.reader.read(1000)]
        return [entry.body.values for entry in observations if isinstance(entry.body, Logged)]


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.monitor.uninstall()
    made.reader.close()
    made.page.close()
    assert not made.monitor.context.guard.failures


class Writer:
    """As TensorBoard's."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> str:
        return f"{tag} {scalar_value} {global_step}"

    def add_scalars(self, main_tag: str, tag_scalar_dict: dict[str, Any]) -> None:
        for tag, value in tag_scalar_dict.items():
            self.add_scalar(f"{main_tag}_{tag}", value)


class Run:
    """As wandb's."""

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        pass


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_accelerates_log(rank):
    before = Accelerator.log
    rank.train()
    accelerator = Accelerator(cpu=True)
    accelerator.log({"train/reward_std": 0.0, "note": "text"}, step=3)
    accelerator.log(values={"kl": 0.5})
    assert [{"log.train/reward_std": 0.0, "log.rewards_std": 0.0}, {"log.kl": 0.5}] == rank.said()
    rank.monitor.uninstall()
    assert before is Accelerator.log


def test_the_trainers_log_shows_its_loss(rank):
    rank.train()
    handler = CallbackHandler([], nn.Linear(1, 1), None, None, None)
    handler.on_log(None, TrainerState(), TrainerControl(), {"loss": 1.3, "learning_rate": 1e-3, "epoch": 0.5})
    assert [{"log.loss": 1.3, "log.learning_rate": 1e-3, "log.epoch": 0.5}] == rank.said()


def test_our_own_callback_is_not_heard_twice(rank):
    class HolterCallback:
        def on_log(self, *_: Any, **__: Any) -> None:
            pass

    rank.train()
    handler = CallbackHandler([HolterCallback()], nn.Linear(1, 1), None, None, None)
    handler.on_log(None, TrainerState(), TrainerControl(), {"loss": 1.3})
    assert [] == rank.said()


def test_a_library_that_is_imported_late_is_followed_too(rank, monkeypatch):
    rank.train()
    module(monkeypatch, "torch.utils.tensorboard.writer", SummaryWriter=type("SummaryWriter", (Writer,), {}))
    writer = sys.modules["torch.utils.tensorboard.writer"].SummaryWriter()
    assert "loss 1.0 2" == writer.add_scalar("loss", 1.0, 2)
    assert [] == rank.said()
    rank.train()
    assert "loss 1.0 2" == writer.add_scalar("loss", 1.0, 2)
    assert [{"log.loss": 1.0}] == rank.said()


def test_of_a_log_within_a_log_the_outermost_counts(rank, monkeypatch):
    module(monkeypatch, "torch.utils.tensorboard.writer", SummaryWriter=type("SummaryWriter", (Writer,), {}))
    rank.train()
    sys.modules["torch.utils.tensorboard.writer"].SummaryWriter().add_scalars("Terms", {"a": 1.0, "b": torch.ones(1)})
    assert [{"log.terms/a": 1.0, "log.terms/b": 1.0}] == rank.said()


@pytest.mark.parametrize("is_begun_before", [True, False])
def test_wandb_is_heard_once_whether_its_run_began_before_or_after(rank, monkeypatch, is_begun_before):
    kind = type("Run", (Run,), {})
    module(monkeypatch, "wandb.sdk.wandb_run", Run=kind)
    run = kind()
    wandb = module(monkeypatch, "wandb", log=print)
    if is_begun_before:
        wandb.log = run.log
    rank.train()
    if not is_begun_before:
        wandb.log = run.log
    wandb.log({"entropy": 2.0})
    run.log(data={"entropy": 3.0})
    assert [{"log.entropy": 2.0}, {"log.entropy": 3.0}] == rank.said()


def test_mlflow_is_heard_by_either_name(rank, monkeypatch):
    def log_metric(key: str, value: float, step: int | None = None) -> None:
        pass

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        pass

    fluent = module(monkeypatch, "mlflow.tracking.fluent", log_metric=log_metric, log_metrics=log_metrics)
    mlflow = module(monkeypatch, "mlflow", log_metric=log_metric, log_metrics=log_metrics)
    rank.train()
    mlflow.log_metric("kl", 1.0, step=2)
    fluent.log_metrics({"kl": 2.0})
    assert [{"log.kl": 1.0}, {"log.kl": 2.0}] == rank.said()


def test_metrics_that_can_be_read_once_are_left_to_mlflow(rank, monkeypatch):
    class MlflowClient:
        def log_batch(self, run_id: str, metrics: Any = ()) -> list[Any]:
            return [run_id, *metrics]

    module(monkeypatch, "mlflow.tracking.client", MlflowClient=MlflowClient)
    rank.train()
    metric = types.SimpleNamespace(key="kl", value=1.0)
    assert ["run", metric] == MlflowClient().log_batch("run", iter([metric]))
    assert [] == rank.said()
    assert ["run", metric] == MlflowClient().log_batch("run", metrics=[metric])
    assert [{"log.kl": 1.0}] == rank.said()


def test_what_a_log_raises_is_the_scripts(rank, monkeypatch):
    def log_metrics(metrics: Any) -> None:
        raise ConnectionError(metrics)

    mlflow = module(monkeypatch, "mlflow", log_metrics=log_metrics)
    module(monkeypatch, "mlflow.tracking.fluent", log_metrics=log_metrics)
    rank.train()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            mlflow.log_metrics("nonsense")
    assert [] == rank.said()
