"""accelerate's ordinary way to resume, `load_state` and `skip_first_batches`, with loaders that have no generator of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from tests.rank.conftest import Worn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holter
from holter.frameworks.accelerate.framework import Accelerate
from holter.rank.framework import Task

pytestmark = pytest.mark.slow

BATCHES, STEPS = 10, 24
Losses = dict[int, float]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An Accelerator of this process, forgotten afterwards."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    _forget()


@pytest.fixture
def worn() -> Iterator[Worn]:
    made = Worn()
    yield made
    made.close()
    assert not made.monitor.context.guard.failures


def _forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Job:
    """Dropout, a shuffled loader, noise that the loop draws before it calls the model."""

    def __init__(self, *, has_generator: bool = False, persistent: bool = False) -> None:
        _forget()
        config = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = Accelerator(dataloader_config=config)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.inner = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(9) if has_generator else None
        workers: Any = {"num_workers": 1, "persistent_workers": True} if persistent else {}
        data = torch.arange(4.0 * 2 * BATCHES).view(-1, 4) / 80
        loader = DataLoader(TensorDataset(data), batch_size=2, shuffle=True, generator=generator, **workers)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, self.inner, loader)

    def run(self, completed: int = 0, until: int = STEPS, on_batch: Any = None, on_held: Any = None) -> Losses:
        """Losses by step; `on_held` is called where a halt would hold the step."""
        found: Losses = {}
        while completed < until:
            epoch, done = divmod(completed, BATCHES)
            self.loader.set_epoch(epoch)
            for (x,) in skip_first_batches(self.loader, done) if done else self.loader:
                if on_batch is not None:
                    on_batch(completed)
                loss = self.model(x + 0.01 * torch.randn_like(x)).pow(2).sum()
                self.accelerator.backward(loss)
                if on_held is not None:
                    on_held(completed)
                self.optimizer.step()
                self.optimizer.zero_grad()
                found[completed] = loss.item()
                completed += 1
                if completed >= until:
                    break
        return found


def halted(worn: Worn, job: Job, at: int, folder: Path) -> tuple[Losses, torch.Tensor]:
    """Save where a halt would, and go on as if there had been none; also the random state that the loop had at that batch."""
    states = []
    worn.monitor.add_model(job.model)

    def hold(step: int) -> None:
        if step == at:
            context = worn.monitor.context
            rewound = context.undo.rewind.known()
            assert rewound is not None
            keeper = Accelerate().keeper(context, [job.inner])
            assert keeper is not None
            with context.guard.paused():
                keeper.save(Task(folder, step, 0, 1, (0,), (), False, True, {0: rewound}))

    def note(step: int) -> None:
        if step == at:
            states.append(torch.get_rng_state())

    return job.run(on_held=hold, on_batch=note), states[0]


@pytest.mark.parametrize("kind", ["plain", "with a generator"])
@pytest.mark.parametrize("at", [5, 10, *(pytest.param(at, marks=pytest.mark.release) for at in (0, 9, 11, 19, 20))])
def test_resumed_in_the_ordinary_way_every_loss_is_the_same(at: int, kind: str, worn: Worn, tmp_path: Path) -> None:
    has_generator = kind != "plain"
    expected, _ = halted(worn, Job(has_generator=has_generator), at, tmp_path)
    job = Job(has_generator=has_generator)
    torch.rand(17)
    job.accelerator.load_state(tmp_path / "state")
    assert {step: loss for step, loss in expected.items() if step >= at} == job.run(completed=at)


def test_restored_when_the_loader_has_drawn_it_is_the_state_of_the_step(worn: Worn, tmp_path: Path) -> None:
    expected, state = halted(worn, Job(), 5, tmp_path)
    job = Job()
    job.accelerator.load_state(tmp_path / "state")

    def restore(step: int) -> None:
        if step == 5:
            torch.rand(3)
            holter.restore(tmp_path)
            assert torch.equal(state, torch.get_rng_state())

    assert {step: loss for step, loss in expected.items() if step >= 5} == job.run(completed=5, on_batch=restore)


@pytest.mark.parametrize("at", [5, 10])
def test_workers_that_persist_draw_their_seed_once_in_a_run(at: int, worn: Worn, tmp_path: Path) -> None:
    expected, _ = halted(worn, Job(persistent=True), at, tmp_path)
    job = Job(persistent=True)
    job.accelerator.load_state(tmp_path / "state")
    within = range(at, (at // BATCHES + 1) * BATCHES)
    assert {step: expected[step] for step in within} == job.run(completed=at, until=within.stop)


def test_a_loop_without_a_loader_has_the_state_of_the_step(worn: Worn, tmp_path: Path) -> None:
    accelerator = Job().accelerator
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, inner)
    for _ in range(3):
        state = torch.get_rng_state()
        accelerator.backward(model(torch.randn(2, 4)).sum())
        optimizer.step()
    context = worn.monitor.context
    torch.manual_seed(5)
    keeper = Accelerate().keeper(context, [inner])
    assert keeper is not None
    rewound = context.undo.rewind.known()
    assert rewound is not None
    with context.guard.paused():
        keeper.save(Task(tmp_path, 3, 0, 1, (0,), (), False, True, {0: rewound}))
    kept = torch.load(tmp_path / "state" / "random_states_0.pkl", weights_only=False)
    assert torch.equal(rewound.torch_state, kept["torch_manual_seed"])
    assert not torch.equal(state, kept["torch_manual_seed"])
    assert "torch_at_step" not in kept
