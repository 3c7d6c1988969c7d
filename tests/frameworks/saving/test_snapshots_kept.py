"""An order that names a snapshot: what is saved is the state of that step, as the framework itself would have saved it then."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from holter.errors import PartlySavedError, RewindError
from holter.frameworks.all import ALL
from holter.frameworks.halts import RankSaver
from holter.frameworks.hf_trainer.framework import HfTrainer
from holter.frameworks.place import RankPlace
from holter.frameworks.saving import random_states
from holter.page import PageWriter
from holter.rank.context import ObservationWriter
from holter.rank.monitor import Monitor
from holter.records import Order

pytestmark = pytest.mark.slow

EVERY, AT, MICRO = 4, 4, 3
"""Steps between two snapshots, the one to go back to, micro-steps of a step."""


class Rank:
    """A monitor in this process that keeps snapshots, and what saves it."""

    def __init__(self) -> None:
        self.page = PageWriter.create(rank=0, world_size=1, pid=1, started_ticks=1, ring_bytes=1 << 20)
        self.monitor = Monitor(
            ObservationWriter(self.page, 0),
            world_size=1,
            budget=1e9,
            floor_s=0.0,
            snapshot_every=EVERY,
            frameworks=ALL,
        )
        self.monitor.install()

    def save(self, directory: Path, *, rank: int = 0, is_held: bool = False, **changes: Any) -> Path:
        """Obey such an order; returns where the framework's files are."""
        usual = {"step": AT + 2, "snapshot": AT, "savers": (0,), "deadline_s": 60.0}
        kind = "commit" if is_held else "rescue"
        order = Order(halt=1, kind=kind, directory=str(directory), **(usual | changes))
        here = RankPlace(
            rank=rank, world_size=len(order.savers + order.lost), local_rank=rank, is_one_host=True, address=""
        )
        RankSaver(self.monitor, here).save(order, is_main_thread=is_held)
        part = json.loads((directory / "parts" / f"{rank}.json").read_text())
        assert not part["missing"]
        return directory / "state"


@pytest.fixture
def wear() -> Iterator[Callable[[], Rank]]:
    """A rank from when the test says so."""
    made: list[Rank] = []

    def put_on() -> Rank:
        made.append(Rank())
        return made[-1]

    yield put_on
    for each in made:
        each.monitor.uninstall()
        each.page.close()
        assert not each.monitor.context.guard.failures


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An Accelerator of this process, forgotten afterwards."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    """A checkpoint that is being written."""
    made = tmp_path / "run" / "checkpoints" / ".4.partial"
    made.mkdir(parents=True)
    return made


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


class Average:
    """Registered for checkpointing by the script."""

    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(1), 0

    def see(self, loss: torch.Tensor) -> None:
        self.mean.lerp_(loss.detach(), 0.1)
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.count = state["mean"], state["count"]


class Accelerated:
    """A loop of accelerate that accumulates, with a schedule and an object of its own."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=MICRO)
        seed()
        model, self.average = net(), Average()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.accelerator.register_for_checkpointing(self.average)

    def micro_steps(self, number: int) -> None:
        for _ in range(number):
            inputs = torch.randn(4, 4) + random.random()  # noqa: S311
            with self.accelerator.accumulate(self.model):
                loss = self.model(inputs).square().mean()
                self.average.see(loss)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()


def weights(model: nn.Module) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("is_held", [pytest.param(True, marks=pytest.mark.release), False], ids=["held", "rescue"])
def test_accelerate_saves_what_it_would_have_saved_at_that_step(wear, tmp_path, partial, is_held):
    straight = Accelerated()
    straight.micro_steps(AT * MICRO)
    own = Path(straight.accelerator.save_state(str(tmp_path / "own")))
    straight.micro_steps(5 * MICRO)

    rank = wear()
    job = Accelerated()
    job.micro_steps((AT + 2) * MICRO + 2)
    kept = rank.save(partial, is_held=is_held)
    rank.monitor.uninstall()
    assert {path.name for path in own.iterdir()} == {path.name for path in kept.iterdir()}
    for name in ("model.safetensors", "optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"):
        assert (own / name).read_bytes() == (kept / name).read_bytes(), name
    counted = [torch.load(folder / "random_states_0.pkl", weights_only=False)["step"] for folder in (own, kept)]
    assert counted[0] == counted[1]

    resumed = Accelerated()
    resumed.accelerator.load_state(str(kept))
    resumed.micro_steps(5 * MICRO)
    assert weights(straight.model) == weights(resumed.model)
    assert straight.scheduler.get_last_lr() == resumed.scheduler.get_last_lr()
    assert straight.average.count == resumed.average.count


@pytest.mark.release
def test_one_rank_saves_for_all_with_what_each_wrote_of_its_own_beginning(wear, partial):
    rank = wear()
    job = Accelerated()
    job.micro_steps((AT + 1) * MICRO)
    rank.save(partial, rank=1, savers=(0, 1))
    [(step, _)] = msgspec.msgpack.decode((partial / "ranks" / "1.msgpack").read_bytes())
    assert step == AT
    kept = rank.save(partial, savers=(0, 1))
    assert {"random_states_0.pkl", "random_states_1.pkl"} == {path.name for path in kept.glob("random_states_*")}


class Loop:
    """A hand-written loop."""

    def __init__(self) -> None:
        seed()
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 4) + random.random()).square().mean().backward()  # noqa: S311
            self.optimizer.step()
            self.scheduler.step()

    def load(self, state: Path) -> None:
        weights_now, optim = get_state_dict(self.model, self.optimizer)
        wanted = {"model": weights_now, "optim": optim, "scheduler": self.scheduler.state_dict(), "step": -1}
        dcp.load(wanted, checkpoint_id=str(state), no_dist=True)
        assert wanted["step"] == AT
        set_state_dict(self.model, self.optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optim"])
        self.scheduler.load_state_dict(wanted["scheduler"])
        random_states.restore(state)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_held", [pytest.param(True, marks=pytest.mark.release), False], ids=["held", "rescue"])
def test_a_plain_loop_goes_on_from_a_snapshot_as_if_nothing_had_been(wear, partial, is_held):
    straight = Loop()
    straight.steps(AT)
    at_snapshot = copy.deepcopy(straight.optimizer.state_dict())
    straight.steps(3)

    rank = wear()
    job = Loop()
    job.steps(AT + 2)
    with torch.no_grad():
        job.model[0].weight.fill_(torch.nan)
    kept = rank.save(partial, is_held=is_held)
    rank.monitor.uninstall()

    resumed = Loop()
    resumed.steps(1)
    resumed.load(kept)
    restored = resumed.optimizer.state_dict()
    for number, entry in at_snapshot["state"].items():
        assert torch.equal(entry["momentum_buffer"], restored["state"][number]["momentum_buffer"])
    resumed.steps(3)
    assert weights(straight.model) == weights(resumed.model)
    assert straight.scheduler.get_last_lr() == resumed.scheduler.get_last_lr()


@pytest.mark.release
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_random_state_of_a_rank_that_is_lost_is_missed(wear, partial):
    rank = wear()
    job = Loop()
    job.steps(AT + 2)
    with pytest.raises(PartlySavedError, match="random state of rank 1"):
        rank.save(partial, lost=(1,))
    assert (partial / "parts" / "0.json").exists()


def test_a_snapshot_that_is_not_there_is_not_made_up(wear, partial):
    rank = wear()
    job = Loop()
    job.steps(AT + 2)
    with pytest.raises(RewindError, match="no snapshot of step 3, only of 4"):
        rank.save(partial, snapshot=3)
    rank.monitor.context.undo.snapshots = None
    with pytest.raises(RewindError, match="HOLTER_SNAPSHOT_EVERY"):
        rank.save(partial)


class Model(nn.Module):
    """As the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.inner(x) - labels).square().mean()}


def trainer(folder: Path, *callbacks: TrainerCallback, **changes: Any) -> Trainer:
    seed()
    data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(48)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=AT + 3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **({"save_strategy": "steps", "save_steps": AT} | changes),
    )
    return Trainer(Model(), arguments, train_dataset=data, callbacks=list(callbacks))


class Halt(TrainerCallback):
    """Saves by order when so many steps are done."""

    def __init__(self, save: Callable[[], Path]) -> None:
        self._save = save
        self.kept: Path | None = None

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == AT + 2:
            self.kept = self._save()
            control.should_training_stop = True
        return control


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_trainer_counts_as_it_did_at_that_step(wear, tmp_path, partial):
    straight = trainer(tmp_path / "straight")
    straight.train()
    own = tmp_path / "straight" / f"checkpoint-{AT}"

    halt = Halt(lambda: rank.save(partial))
    made = trainer(tmp_path / "halted", halt, save_strategy="no")
    rank = wear()
    made.train()
    rank.monitor.uninstall()
    assert halt.kept is not None
    assert (own / "model.safetensors").read_bytes() == (halt.kept / "model.safetensors").read_bytes()
    for name in ("optimizer.pt", "scheduler.pt"):
        one, other = (torch.load(folder / name, weights_only=False) for folder in (own, halt.kept))
        assert str(one) == str(other), name
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (own, halt.kept)]
    for name in ("global_step", "epoch", "total_flos", "num_input_tokens_seen", "max_steps"):
        assert states[0][name] == states[1][name], name
    losses = [[entry["loss"] for entry in state["log_history"]] for state in states]
    assert losses[0] == losses[1]
    assert len(losses[0]) == AT

    resumed = trainer(tmp_path / "resumed", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(halt.kept))
    assert weights(straight.model) == weights(resumed.model)


def test_a_callback_that_exports_its_state_is_set_back(tmp_path):
    stopping = EarlyStoppingCallback(early_stopping_patience=9)
    made = trainer(tmp_path, stopping)
    made.create_optimizer()
    [source] = HfTrainer().counters([made.optimizer])
    part = source()
    stopping.early_stopping_patience_counter = 5
    made.state.log_history.append({"loss": 1.0})
    part.put(made, part.state, [])
    assert (0, []) == (stopping.early_stopping_patience_counter, made.state.log_history)
