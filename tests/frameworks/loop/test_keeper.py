"""A loop of the script's own: what is found besides its model and optimizer, under which names, and what is said of it."""

import copy
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.rank.conftest import Worn
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holter.errors import PartlySavedError
from holter.frameworks import halts
from holter.frameworks.loop import keeper as distributed
from holter.frameworks.saving.averages import MANY_CHANGES
from holter.rank.framework import Task

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def worn() -> Iterator[Worn]:
    # What other tests have let go of is no part of this script.
    gc.collect()
    made = Worn()
    yield made
    made.close()
    assert not made.monitor.context.guard.failures


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3, average: Any = None) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if average is not None:
            average(model)


def keep(worn: Worn, directory: Path, **how: Any) -> dict[str, Any]:
    """Save and prove; returns names.json."""
    usual = {"step": 3, "rank": 0, "world_size": 1, "savers": (0,), "lost": (), "is_rescue": False}
    rewound = worn.monitor.context.undo.rewind.known()
    assert rewound is not None
    task = Task(directory=directory, writes_shared=True, rewinds={0: rewound}, **(usual | how))
    with worn.monitor.context.guard.paused():
        keeper = distributed.DistributedKeeper(worn.monitor.context, worn.monitor.optimizers)
        try:
            keeper.save(task)
        finally:
            halts.prove(task, keeper)
    assert not json.loads((directory / "parts" / "0.json").read_text())["missing"]
    return json.loads((directory / "state" / "names.json").read_text())


def loads(directory: Path, **expected: Any) -> None:
    """What was saved under these keys, by torch's own function, into states of other values."""
    state = {key: _emptied(value) for key, value in expected.items()}
    dcp.load(state, checkpoint_id=directory / "state")
    for key, value in expected.items():
        assert list(value) == list(state[key])
        assert all(torch.equal(value[name], state[key][name]) for name in value), key


def _emptied(value: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(each) for name, each in value.items()}


@pytest.mark.parametrize("found", ["first", "later"])
def test_an_average_is_kept_under_a_key_of_its_own_and_takes_no_name_from_the_model(
    found: str, worn: Worn, tmp_path: Path
) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if found == "first":
        worn.monitor.add_model(ema)
    worn.monitor.add_model(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer, average=ema.update_parameters)
    assert "ema, AveragedModel" == keep(worn, tmp_path)["ema"]
    loads(tmp_path, model=net.state_dict(), ema=ema.state_dict())


def test_a_copy_that_the_script_averages_by_hand_is_kept_and_one_that_rests_is_not(worn: Worn, tmp_path: Path) -> None:
    net = nn.Linear(4, 1)
    slow, reference = copy.deepcopy(net).requires_grad_(False), copy.deepcopy(net).requires_grad_(False)

    @torch.no_grad()
    def average(model: nn.Module) -> None:
        for mine, theirs in zip(slow.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)

    worn.monitor.add_model(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    train(net, optimizer, average=average, steps=MANY_CHANGES + 1)
    reference.load_state_dict(net.state_dict())
    names = keep(worn, tmp_path)
    assert {"optim": "groups of optimizer 1 (SGD): 1", "ema": "slow, Linear"} == names
    loads(tmp_path, model=net.state_dict(), ema=slow.state_dict())


def test_a_model_of_an_earlier_training_is_no_average(worn: Worn, tmp_path: Path) -> None:
    earlier, net = nn.Linear(4, 1), nn.Linear(4, 1)
    with worn.monitor.context.guard.paused():
        train(earlier, torch.optim.SGD(earlier.parameters(), lr=0.01), steps=MANY_CHANGES + 1)
    worn.monitor.add_model(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    train(net, optimizer)
    assert ["optim"] == list(keep(worn, tmp_path))


def test_an_average_that_was_logged_is_kept(worn: Worn, tmp_path: Path) -> None:
    net = nn.Linear(4, 1)
    shadow = copy.deepcopy(net)
    worn.monitor.add_model(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    train(net, optimizer, average=lambda _: worn.monitor.logs.log({"ema": shadow}))
    assert "shadow, Linear" == keep(worn, tmp_path)["ema"]
    loads(tmp_path, ema=shadow.state_dict())


def test_a_snapshot_that_had_no_average_in_it_says_so(worn: Worn, tmp_path: Path) -> None:
    net = nn.Linear(4, 1)
    ema = AveragedModel(net).requires_grad_(False)
    worn.monitor.add_model(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    train(net, optimizer, average=ema.update_parameters)
    with pytest.raises(PartlySavedError, match="averages of the weights are not saved as of this step: ema"):
        keep(worn, tmp_path, is_snapshot=True)
    loads(tmp_path, model=net.state_dict())


def test_schedulers_and_scalers_are_numbered_by_their_optimizers_and_written_down(worn: Worn, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(net[1].parameters(), lr=0.2)
    # Made in the other order than the optimizers are stepped in.
    of_second, of_first = ConstantLR(second, factor=0.5), StepLR(first, 7)
    late = torch.amp.GradScaler("cpu", init_scale=8.0)
    early = torch.amp.GradScaler("cpu", init_scale=4.0)
    worn.monitor.add_model(net)
    train(net, first, second)
    for scaler, optimizer in ((late, second), (early, first)):
        scaler.scale(net(torch.ones(2, 4)).sum()).backward()
        scaler.unscale_(optimizer)
    names = keep(worn, tmp_path)
    assert {
        "optim": "groups of optimizer 1 (SGD): 1, optimizer 2 (AdamW): 1",
        "scheduler": "of_first, StepLR of optimizer 1 (SGD)",
        "scheduler_2": "of_second, ConstantLR of optimizer 2 (AdamW)",
        "scaler": "early, GradScaler of optimizer 1 (SGD)",
        "scaler_2": "late, GradScaler of optimizer 2 (AdamW)",
    } == names
    state = {
        "scaler": {"scale": 0.0},
        "scaler_2": {"scale": 0.0},
        "scheduler": {"step_size": 0},
        "lr_scheduler": {"step_size": 0},
    }
    dcp.load(state, checkpoint_id=tmp_path / "state")
    assert (4.0, 8.0) == (state["scaler"]["scale"], state["scaler_2"]["scale"])
    assert 7 == state["scheduler"]["step_size"] == state["lr_scheduler"]["step_size"]
    assert of_first.optimizer is first
    assert of_second.optimizer is second
