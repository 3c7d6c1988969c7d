"""A rank whose stream hangs is saved all the same: nothing of a save is queued behind the hang, nor waits for it, whoever the keeper is."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
import torch.distributed as dist
from tests.rank.conftest import Worn
from torch import nn
from torch.distributed.fsdp import fully_shard

from holter.frameworks.halts import RankSaver
from holter.frameworks.place import RankPlace
from holter.records import Order

pytestmark = [pytest.mark.device, pytest.mark.slow]
NUM_STEPS = 3
LONG_S = 60.0

Train = Callable[[], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def by_loop(_: Path) -> tuple[nn.Module, Train]:
    model = network().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8, device="cuda")).square().mean().backward()
        optimizer.step()

    return model, train


def by_accelerate(_: Path) -> tuple[nn.Module, Train]:
    from accelerate import Accelerator  # noqa: PLC0415 - slow

    accelerator = Accelerator()
    plain = network()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))

    def train(accelerator: Any = accelerator) -> None:
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(4, 8, device="cuda")).square().mean())
        optimizer.step()

    return model, train


class Leave(Exception):  # noqa: N818 - it is none
    """Out of the Trainer's own loop, which then stands in the middle of a step."""


def by_trainer(directory: Path) -> tuple[nn.Module, Train]:
    from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415 - slow

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(x).square().mean()}

    class Stop(TrainerCallback):
        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == NUM_STEPS:
                raise Leave

    model = Model()
    arguments = TrainingArguments(
        str(directory / "trainer"), max_steps=9, per_device_train_batch_size=4, report_to=[], disable_tqdm=True
    )
    arguments._n_gpu = 1  # else it would wrap the model for both devices
    data = [{"x": torch.full((8,), float(k))} for k in range(64)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Stop()])
    is_over = []

    def train(trainer: Any = trainer) -> None:
        if not is_over:
            is_over.append(True)
            with pytest.raises(Leave):
                trainer.train()

    return model, train


def rescue(worn: Worn, here: RankPlace, directory: Path, model: nn.Module) -> list[BaseException]:
    """Save from a thread while the stream of the training hangs; what that raised, or that it did not end."""
    stream, failures = torch.cuda.current_stream(), [TimeoutError("the save waits for the hang")]
    saver = RankSaver(worn.monitor, here)
    step = saver.position().step
    savers = tuple(range(here.world_size))
    order = Order(halt=1, kind="commit", step=step, directory=str(directory), savers=savers, deadline_s=LONG_S)

    def save() -> None:
        try:
            saver.save(order, is_main_thread=False)
            failures.clear()
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures[:] = [error]

    fake_cuda.drain()
    with fake_cuda.closed(stream):
        # What the hung step would still compute.
        kept = [parameter.detach() * 2 for parameter in model.parameters()]
        thread = threading.Thread(target=save, daemon=True)
        thread.start()
        thread.join(LONG_S)
        found = list(failures)
        assert fake_cuda.num_waiting(stream) >= len(kept), "it hangs still"
    fake_cuda.drain()
    return found


@pytest.mark.parametrize("make", [by_loop, by_accelerate, pytest.param(by_trainer, marks=pytest.mark.release)])
def test_what_is_saved_while_a_stream_hangs_is_proven_by_its_keeper(make, tmp_path) -> None:
    worn = Worn()
    model, train = make(tmp_path)
    worn.monitor.add_model(model)
    for _ in range(NUM_STEPS):
        train()
    here = RankPlace(rank=0, world_size=1, local_rank=0, is_one_host=True, address="")
    assert [] == rescue(worn, here, tmp_path / "saved", model)
    assert any((tmp_path / "saved" / "state").iterdir())
    assert not worn.monitor.context.guard.failures


def shard(rank: int, directory: Path) -> list[str]:
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    worn = Worn(world_size=2)
    model = network().cuda()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    worn.monitor.add_model(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 8, device="cuda")).square().mean().backward()
        optimizer.step()
    here = RankPlace(rank=rank, world_size=2, local_rank=rank, is_one_host=True, address="")
    return list(map(repr, rescue(worn, here, directory, model)))


@pytest.mark.release
def test_shards_are_saved_by_each_rank_while_its_stream_hangs(tmp_path) -> None:
    assert [[], []] == fake_cuda.run_ranks(lambda rank: shard(rank, tmp_path / "saved"))
