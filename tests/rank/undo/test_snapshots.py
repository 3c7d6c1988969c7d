"""A training state comes back as it was some steps ago, bit for bit, and copying it changes nothing."""

import copy
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holter.errors import RewindError
from holter.rank.readings.samples import local
from holter.rank.undo import snapshots
from holter.rank.undo.buffers import SMALL_BYTES, MovingBuffers
from holter.records import Snapped

pytestmark = pytest.mark.slow

EVERY = 4


class Net(nn.Module):
    """Everything that moves: normalisation, dropout, a weight that is tied, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8))
        self.tied = self.inner[0]
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.tied(self.inner(inputs)) * self.frozen


class Job:
    """A loop whose step depends on all of its state: weights, moments, rates, scale, and the random generators."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], *, is_scaled: bool = False) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the generator that scripts share
        self.model = Net()
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=5),
                torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4, 6]),
            ],
            [5],
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=is_scaled)

    def steps(self, number: int) -> None:
        for _ in range(number):
            inputs = torch.randn(4, 8) + random.random() + np.random.rand()  # noqa: NPY002, S311
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(inputs).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        """Copied, with the random states."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": np.random.get_state(),  # noqa: NPY002
            }
        )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, amsgrad=True),
    "tensor_rate": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.05), capturable=False, foreach=False),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.05),
}


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, whatever it is."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, np.ndarray):
        return one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name == "adamw" else pytest.mark.release)
        for name, make in OPTIMIZERS.items()
    ],
)
def test_a_run_that_went_back_goes_on_as_if_it_had_not(wear, make, is_scaled):
    straight = Job(make, is_scaled=is_scaled)
    straight.steps(EVERY)
    at_snapshot = straight.state()
    straight.steps(3)
    expected = straight.state()

    worn = wear(snapshot_every=EVERY)
    job = Job(make, is_scaled=is_scaled)
    job.steps(EVERY + 3)
    assert same(expected, job.state()), "copying changed nothing"
    job.steps(1)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(torch.nan) if parameter.requires_grad else None
    assert EVERY == worn.monitor.context.undo.snapshots.restore(EVERY).step
    assert same(at_snapshot, job.state())
    job.steps(3)
    assert same(expected, job.state())
    assert not worn.monitor.context.guard.failures


def told_of(worn: Any, job: Job) -> Job:
    """Where bytes are counted: a model that nobody told of is looked for among all living objects, and those of other tests are found with it."""
    worn.monitor.add_model(job.model)
    return job


def test_each_snapshot_is_told_once_it_is_whole_and_the_newest_two_are_kept(wear, capfd):
    worn = wear(snapshot_every=EVERY)
    job = told_of(worn, Job(OPTIMIZERS["adamw"]))
    job.steps(3 * EVERY + 1)
    told = worn.said(Snapped)
    assert [EVERY, 2 * EVERY, 3 * EVERY] == [observation.step for observation in told]
    held = [*job.model.buffers(), *(p for p in job.model.parameters() if p.requires_grad)]
    moments = [t for state in job.optimizer.state.values() for t in state.values()]
    assert {sum(tensor.nbytes for tensor in (*held, *moments))} == {told[0].body.num_bytes, told[-1].body.num_bytes}
    assert all(0 < observation.body.seconds < 60 for observation in told)
    assert 1 == capfd.readouterr().err.count("every 4 steps the training state is copied in memory: 0.0 MB on rank 0")
    snapshots = worn.monitor.context.undo.snapshots
    with pytest.raises(RewindError, match="no snapshot of step 4, only of 8 and 12"):
        snapshots.restore(EVERY)
    assert 2 * EVERY == snapshots.restore(2 * EVERY).step


def test_the_memory_of_the_oldest_takes_the_next(wear):
    worn = wear(snapshot_every=1)
    job = Job(OPTIMIZERS["adamw"])
    places = []
    for _ in range(6):
        job.steps(1)
        places += [each.copies[0].data_ptr() for each in worn.monitor.context.undo.snapshots._whole]
    assert 2 == len(set(places[1:]))


@pytest.mark.parametrize(("share", "kept"), [(2.0, [8, 12]), (1.5, [12]), (0.5, [])])
def test_no_more_memory_is_taken_than_is_allowed(wear, capfd, share, kept):
    worn = wear(snapshot_every=EVERY)
    job = told_of(worn, Job(OPTIMIZERS["adamw"]))
    job.steps(EVERY + 1)
    one = worn.said(Snapped)[0].body.num_bytes
    worn.monitor.uninstall()
    del job
    gc.collect()
    capfd.readouterr()

    bounded = wear(snapshot_every=EVERY, snapshot_bytes=int(share * one))
    job = told_of(bounded, Job(OPTIMIZERS["adamw"]))
    job.steps(3 * EVERY + 1)
    assert kept == [each.step for each in bounded.monitor.context.undo.snapshots._whole]
    assert (1 if kept == [] else 0) == capfd.readouterr().err.count("keeps no snapshots any more: one takes 0.0 MB")


def test_a_step_that_is_under_way_can_be_gone_back_to(wear):
    worn = wear(snapshot_every=EVERY)
    job = Job(OPTIMIZERS["adamw"])
    job.steps(EVERY)
    before = job.state()
    job.model(torch.randn(4, 8)).sum().backward()
    assert worn.monitor.context.undo.snapshots.restore(EVERY).step == EVERY
    assert same(before, job.state())


def test_a_buffer_for_whose_copy_there_was_no_room_is_in_the_snapshot(wear):
    def remember(model: nn.Module, *_: Any) -> None:
        model.memory.add_(1)

    worn = wear(snapshot_every=EVERY)
    worn.monitor.context.undo.rewind.buffers = MovingBuffers(worn.monitor.context, max_bytes=1)
    job = Job(OPTIMIZERS["adamw"])
    job.model.register_buffer("memory", torch.zeros(SMALL_BYTES))
    job.model.register_forward_hook(remember)
    job.steps(EVERY)
    before = job.state()
    job.steps(2)
    worn.monitor.context.undo.snapshots.restore(EVERY)
    assert same(before, job.state())


def test_the_step_waits_until_its_weights_are_copied(wear, monkeypatch):
    copy_at_once = snapshots._copy

    def copy_late(pairs: Any) -> None:
        time.sleep(0.2 if threading.current_thread().name == "holter-snapshot" else 0.0)
        copy_at_once(pairs)

    monkeypatch.setattr(snapshots, "_copy", copy_late)
    worn = wear(snapshot_every=EVERY)
    job = Job(OPTIMIZERS["adamw"])
    job.steps(EVERY)
    before = job.state()
    job.steps(2)
    worn.monitor.context.undo.snapshots.restore(EVERY)
    assert same(before, job.state())
    assert worn.said(Snapped)[0].body.seconds > 0.19


class DeepSpeedEngine(nn.Module):
    """Called like the wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)


def test_what_cannot_be_copied_whole_is_not_copied(wear, capfd):
    worn = wear(snapshot_every=EVERY)
    job = Job(OPTIMIZERS["adamw"])
    job.model = DeepSpeedEngine(job.model)
    job.steps(2 * EVERY + 1)
    assert [] == worn.said(Snapped)
    assert 1 == capfd.readouterr().err.count("keeps no snapshots any more: DeepSpeedEngine keeps weights")


def test_a_model_that_is_let_go_of_takes_its_snapshots_along(wear):
    worn = wear(snapshot_every=EVERY)
    job = Job(OPTIMIZERS["adamw"])
    job.steps(2 * EVERY + 1)
    snapshots = worn.monitor.context.undo.snapshots
    copies = [weakref.ref(tensor) for each in snapshots._whole for tensor in each.copies]
    weight = weakref.ref(job.model.inner[0].weight)
    assert copies
    del job
    gc.collect()
    assert weight() is None
    assert not [reference for reference in copies if reference() is not None]


def test_what_fails_ends_the_snapshots_and_nothing_else(wear, capfd, monkeypatch):
    def fail(_source: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room")

    straight = Job(OPTIMIZERS["adamw"])
    straight.steps(2 * EVERY + 1)
    monkeypatch.setattr(snapshots, "room_for", fail)
    worn = wear(snapshot_every=EVERY)
    job = Job(OPTIMIZERS["adamw"])
    job.steps(2 * EVERY + 1)
    assert same(straight.state(), job.state())
    assert [] == worn.said(Snapped)
    assert 1 == capfd.readouterr().err.count("rank 0 keeps no snapshots any more: MemoryError: no room")
    assert not worn.monitor.context.guard.failures


def test_an_optimizer_that_came_into_use_since_cannot_be_gone_back_with(wear):
    worn = wear(snapshot_every=EVERY)
    job = Job(OPTIMIZERS["momentum"])
    job.steps(EVERY + 1)
    job.optimizer = OPTIMIZERS["adamw"](job.model.inner.parameters())
    job.steps(1)
    with pytest.raises(RewindError, match=r"has no AdamW that is used now|does not exist any more"):
        worn.monitor.context.undo.snapshots.restore(EVERY)


class Restless(Net):
    """Follows a weight by an average, inside of its forward pass."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.tied.weight.mul_(0.99)
            self.frozen.lerp_(self.tied.bias, 0.1)
        return super().forward(inputs)


def test_weights_that_change_during_the_forward_pass_are_copied_before_it(wear, capfd):
    worn = wear(snapshot_every=EVERY)
    job = Job(OPTIMIZERS["adamw"])
    job.model.__class__ = Restless
    job.steps(2 * EVERY)
    before = job.state()
    job.steps(3)
    assert [2 * EVERY] == [observation.step for observation in worn.said(Snapped)]
    assert 1 == capfd.readouterr().err.count("there is no snapshot of step 4, and the next ones are copied before")
    worn.monitor.context.undo.snapshots.restore(2 * EVERY)
    assert same(before, job.state())


class Following(Net):
    """Moves a frozen weight only."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.frozen.lerp_(self.tied.bias, 0.1)
        return super().forward(inputs)


def test_a_frozen_weight_that_moves_is_missed_once_and_copied_from_then_on(wear):
    worn = wear(snapshot_every=EVERY)
    job = Job(OPTIMIZERS["adamw"])
    job.model.__class__ = Following
    job.steps(EVERY + 1)
    with pytest.raises(RewindError, match="lacks a frozen parameter"):
        worn.monitor.context.undo.snapshots.restore(EVERY)
    job.steps(EVERY - 1)
    before = job.state()
    job.steps(2)
    worn.monitor.context.undo.snapshots.restore(2 * EVERY)
    assert same(before, job.state())


def test_a_forward_pass_that_is_not_seen_is_said(wear, capfd):
    worn = wear(snapshot_every=EVERY)
    job = Job(OPTIMIZERS["adamw"])
    job.model.eval()
    job.steps(2 * EVERY + 1)
    assert [] == worn.said(Snapped)
    assert 1 == capfd.readouterr().err.count("no snapshot of step 4, because its forward pass was not seen")


def test_lists_of_tensors_go_back_and_so_does_an_optimizer_that_calls_the_model_itself(wear):
    worn = wear(snapshot_every=EVERY)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    inputs = torch.randn(16, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    def state() -> dict[str, Any]:
        return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    for _ in range(2 * EVERY):
        optimizer.step(closure)
    before = state()
    for _ in range(2):
        optimizer.step(closure)
    assert not same(before, state())
    worn.monitor.context.undo.snapshots.restore(2 * EVERY)
    assert same(before, state())
    assert before["optimizer"]["state"][0]["old_dirs"]


def test_a_scheduler_that_comes_late_is_found(wear):
    worn = wear(snapshot_every=1)
    job = Job(OPTIMIZERS["momentum"])
    first, job.scheduler = job.scheduler, torch.optim.lr_scheduler.ConstantLR(job.optimizer)
    job.steps(3)
    job.scheduler = first
    late = torch.optim.lr_scheduler.StepLR(job.optimizer, 2)
    job.steps(2)
    kept = late.state_dict()
    job.steps(1)
    late.step()
    worn.monitor.context.undo.snapshots.restore(5)
    assert kept["last_epoch"] == late.last_epoch


@pytest.mark.usefixtures("gloo")
def test_shards_go_back_where_they_lie(wear):
    worn = wear(snapshot_every=EVERY)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (1,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def steps(number: int) -> list[bytes]:
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [local(tensor).numpy().tobytes() for tensor in (*model.parameters(), *moments)]

    before = steps(EVERY)
    after = steps(3)
    model(torch.randn(4, 8)).sum()
    worn.monitor.context.undo.snapshots.restore(EVERY)
    for part in model:
        part.reshard()
    assert before == steps(0)
    assert after == steps(3)


def test_without_the_setting_there_is_nothing_of_it(wear):
    assert wear().monitor.context.undo.snapshots is None
