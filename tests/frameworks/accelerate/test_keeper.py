"""What the keeper for accelerate writes, against what the Accelerator writes by itself when the same step has just begun."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from holter.errors import PartlySavedError
from holter.frameworks import halts
from holter.frameworks.accelerate.framework import Accelerate
from holter.rank.framework import Task
from holter.rank.models import Models
from holter.rank.undo.rewind import Generators, Rewound

pytestmark = pytest.mark.slow

EVERY = 3


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An Accelerator of this process, forgotten afterwards."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    # What other tests have let go of is no part of this script.
    gc.collect()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def context(num_backwards: int) -> Any:
    """What the keeper asks of it, of a script without loaders."""
    return SimpleNamespace(
        log=SimpleNamespace(num_backwards=num_backwards),
        undo=SimpleNamespace(rewind=SimpleNamespace(fed_by=frozenset())),
        data=SimpleNamespace(under_way=lambda _asked: []),
        models=Models(),
    )


class Job:
    """A loop that can be stopped at any micro-step."""

    def __init__(self, project: Path) -> None:
        configuration = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True, total_limit=1)
        self.accelerator = Accelerator(gradient_accumulation_steps=EVERY, project_config=configuration)
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        self.inner = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(self.inner, 0.1, total_steps=100)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, self.inner, scheduler)

    def micro_steps(self, number: int, *, is_last_held: bool = False) -> None:
        for index in range(number):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(torch.ones(2, 4)).sum())
                if is_last_held and index == number - 1:
                    return
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def keeper(self, num_backwards: int) -> Any:
        found = Accelerate().keeper(context(num_backwards), [self.inner])
        assert found is not None
        return found


def rewound(seed: int) -> Rewound:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        states = Generators().take()
    fields = {name: getattr(states, name) for name in states.__struct_fields__}
    return Rewound(**fields, step=2, forward=None)


def task(directory: Path, *, is_rescue: bool, rewinds: dict[int, Rewound] | None = None, world_size: int = 1) -> Task:
    return Task(
        directory=directory,
        step=2,
        rank=0,
        world_size=world_size,
        savers=(0,),
        lost=(),
        is_rescue=is_rescue,
        writes_shared=True,
        rewinds=rewinds or {},
    )


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("micro_steps", "way"), [(3, "held"), (2, "rescue"), (0, "rescue")])
@pytest.mark.usefixtures("alone")
def test_writes_what_save_state_writes_when_the_step_begins(micro_steps: int, way: str, tmp_path: Path) -> None:
    is_held = way == "held"
    job = Job(tmp_path)
    job.micro_steps(2 * EVERY)
    job.accelerator.save_state()
    own = tmp_path / "checkpoints" / "checkpoint_0"
    before = torch.load(own / "random_states_0.pkl", weights_only=False)
    job.micro_steps(micro_steps, is_last_held=is_held)

    keeper = job.keeper(micro_steps)
    keeper.save(task(tmp_path / "halt", is_rescue=not is_held, rewinds={0: rewound(7)}))

    kept = files(tmp_path / "halt" / "state")
    assert set(files(own)) == set(kept), "nor was the one that total_limit would have taken deleted"
    for name in ("model.safetensors", "optimizer.bin", "scheduler.bin"):
        assert files(own)[name] == kept[name], name
    states = torch.load(tmp_path / "halt" / "state" / "random_states_0.pkl", weights_only=False)
    assert (list(before), before["step"]) == (list(states), states["step"])
    # Two parameters, and of each a step and two moments.
    assert 2 + 2 * 3 == len(list(keeper.live()))


@pytest.mark.usefixtures("alone")
def test_a_rescue_writes_random_states_for_every_rank_and_says_whose_are_missing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.micro_steps(EVERY)
    rewinds = {0: rewound(7), 2: rewound(8)}
    with pytest.raises(PartlySavedError, match="rank 1 "):
        job.keeper(0).save(task(tmp_path / "halt", is_rescue=True, rewinds=rewinds, world_size=3))
    state = tmp_path / "halt" / "state"
    assert {"random_states_0.pkl", "random_states_2.pkl"} == {path.name for path in state.glob("random_states_*")}
    for rank, expected in rewinds.items():
        kept = torch.load(state / f"random_states_{rank}.pkl", weights_only=False)
        assert torch.equal(expected.torch_state, kept["torch_manual_seed"])
        assert expected.python_state == kept["random_state"]
    assert job.accelerator.num_processes == 1
    assert (state / "model.safetensors").exists()


@pytest.mark.usefixtures("alone")
def test_hooks_of_the_script_are_called(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.micro_steps(EVERY)
    job.accelerator.register_save_state_pre_hook(lambda _models, _weights, folder: (Path(folder) / "mine").touch())
    job.keeper(0).save(task(tmp_path / "halt", is_rescue=False, rewinds={0: rewound(7)}))
    assert (tmp_path / "halt" / "state" / "mine").exists()


@pytest.mark.usefixtures("alone")
def test_an_accelerator_of_other_optimizers_is_not_ours(tmp_path: Path) -> None:
    Job(tmp_path)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters())
    assert Accelerate().keeper(context(0), [other]) is None


@pytest.mark.usefixtures("alone")
def test_objects_that_are_registered_at_any_time_are_known(tmp_path: Path) -> None:
    job = Job(tmp_path)
    found = Accelerate().registered(job.inner)
    assert found is not None
    assert [] == list(found())
    average = nn.Linear(1, 1)
    job.accelerator.register_for_checkpointing(average)
    assert [average] == list(found())
    assert Accelerate().registered(torch.optim.SGD(average.parameters())) is None


class Stateful(DataLoader[Any]):
    """What torchdata documents of its StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        return {"_num_yielded": 5}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", ["held", "rescue"])
def test_the_position_of_a_stateful_loader_is_not_saved_and_that_is_said(way: str, tmp_path: Path) -> None:
    job = Job(tmp_path)
    plain, stateful = job.accelerator.prepare(DataLoader(range(8)), DataLoader(range(8)))
    stateful.base_dataloader = Stateful(range(8))
    stateful.use_stateful_dataloader = True
    next(iter(stateful))
    job.micro_steps(EVERY)
    job.accelerator.save_state()
    position = "dl_state_dict_1.bin"
    assert (tmp_path / "checkpoints" / "checkpoint_0" / position).exists()
    with pytest.raises(PartlySavedError, match="data loader 1 is not saved"):
        job.keeper(0).save(task(tmp_path / "halt", is_rescue=way == "rescue", rewinds={0: rewound(7)}))
    written = files(tmp_path / "halt" / "state")
    assert position not in written
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl"} <= set(written), "all else is there"
    assert not plain.use_stateful_dataloader


@pytest.mark.usefixtures("alone")
def test_an_average_is_missed_unless_the_accelerator_was_told_of_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    average = AveragedModel(job.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        job.micro_steps(EVERY)
        average.update_parameters(job.model)
    missing = proven(job, tmp_path / "halt")
    assert ["average, an average: module.weight", "average, an average: module.bias"] == missing
    job.accelerator.register_for_checkpointing(average)
    assert not proven(job, tmp_path / "again")


def proven(job: Job, directory: Path) -> list[str]:
    """Save, read back; the names of what was not found."""
    keeper, order = job.keeper(0), task(directory, is_rescue=False, rewinds={0: rewound(7)})
    keeper.save(order)
    halts.prove(order, keeper)
    return [tensor["name"] for tensor in json.loads((directory / "parts" / "0.json").read_text())["missing"]]
