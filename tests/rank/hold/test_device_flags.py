"""A NaN never reaches the weights of a device, however far its host is ahead; and the run that resumes has the bits of one that never met it."""

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.rank.conftest import Worn
from torch import nn

from holter.frameworks.halts import RankSaver
from holter.frameworks.place import RankPlace
from holter.frameworks.saving import random_states
from holter.rank.hold.device_flags import RUN_AHEAD, DeviceFlags, takes_flag
from holter.rank.hold.finite_guard import SAID_AFTER
from holter.records import Order, StepDone

pytestmark = [pytest.mark.device, pytest.mark.slow]

HERE = RankPlace(rank=0, world_size=1, local_rank=0, is_one_host=True, address="")
NUM_STEPS = 10
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05, fused=True, amsgrad=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, fused=True),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True),
    "loop": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=False),
}


WAITING = ("foreach", "loop")
"""Of these, those that take no flag: their steps wait for the device's answer."""


class HaltedError(BaseException):
    """The process would end here."""


class Agent:
    """Decides at once that the run is halted, and has it saved."""

    def __init__(self, worn: Worn, directory: Path) -> None:
        self._worn, self._directory = worn, directory
        self.held: list[tuple[int, str, bool]] = []

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False

    def hold(self, step: int, why: str, num_skipped: int = 0) -> None:
        saver = RankSaver(self._worn.monitor, HERE)
        self.held.append((step, why, saver.position().is_torn))
        assert (step, 0) == (saver.position().step, num_skipped)
        order = Order(halt=1, kind="commit", step=step, directory=str(self._directory), savers=(0,), deadline_s=60.0)
        saver.save(order, is_main_thread=True)
        raise HaltedError


class Job:
    """Batch normalisation, dropout on the device, a schedule: all that a step moves beside the weights."""

    def __init__(self, kind: str, *, is_scaled: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4)).cuda()
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=3, enabled=is_scaled)
        self.number = 0

    def step(self, *, is_bad: bool = False, is_synchronous: bool = False) -> None:
        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(self.number))
        if self.number:
            # Of the first step nobody has seen what it drew before its forward pass.
            inputs += torch.rand(())
        self.number += 1
        inputs = inputs.pin_memory().cuda(non_blocking=True)
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        self.scaler.scale(loss).backward()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        if is_bad:
            self.model[0].weight.grad[1].fill_(math.nan)
        if is_synchronous:
            loss.item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def state(self) -> dict[str, Any]:
        fake_cuda.drain()
        tensors = {f"model.{k}": v.cpu() for k, v in self.model.state_dict().items()}
        for number, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{number}.{key}": value.cpu() for key, value in state.items()}
        plain = {"lr": self.optimizer.param_groups[0]["lr"], "scheduler": self.scheduler.last_epoch}
        if self.scaler.is_enabled():
            plain["scaler"] = self.scaler.state_dict()
        return tensors | plain | {"random": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}

    def load(self, state: Path) -> int:
        """As a script of one's own does, without holter."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        names = [name for name, _ in self.model.named_parameters()]
        whole = {
            "model": self.model.state_dict(),
            "optim": {
                "state": {
                    name: self.optimizer.state[p]
                    for name, p in self.model.named_parameters()
                    if self.optimizer.state[p]
                },
                "param_groups": [{**self.optimizer.param_groups[0], "params": names}],
            },
            "scheduler": self.scheduler.state_dict(),
        }
        if self.scaler.is_enabled():
            self.scaler.scale(torch.ones((), device="cuda"))
            whole["scaler"] = self.scaler.state_dict()
        metadata = dcp.FileSystemReader(state).read_metadata().state_dict_metadata
        has_moments = any(key.startswith("optim.state") for key in metadata)
        if not has_moments:
            whole["optim"]["state"] = {}
            self.optimizer.state.clear()
        dcp.load(whole, checkpoint_id=str(state), no_dist=True)
        self.model.load_state_dict(whole["model"])
        self.scheduler.load_state_dict(whole["scheduler"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(whole["scaler"])
        for key, value in whole["optim"]["param_groups"][0].items():
            if key != "params":
                self.optimizer.param_groups[0][key] = value
        self.number = random_states.restore(state)
        return self.number


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        key for key in one.keys() | other.keys() if key not in one or key not in other or not same(one[key], other[key])
    ]


@contextmanager
def watched(directory: Path, **settings: Any) -> Iterator[tuple[Worn, Agent]]:
    worn = Worn(**{"guard_wait_s": 30.0, **settings})
    worn.monitor.context.hold.agent = agent = Agent(worn, directory)
    try:
        yield worn, agent
    finally:
        worn.close()


def halted(kind: str, at: int, how: str, directory: Path, **settings: Any) -> tuple[Agent, int, list[int]]:
    """A run that meets a NaN; returns who stood, how many steps the host made, and the steps that were told to be bad."""
    is_scaled = settings.pop("is_scaled", False)
    with watched(directory, **settings) as (worn, agent):
        job = Job(kind, is_scaled=is_scaled)
        worn.monitor.add_model(job.model)
        number = 0
        try:
            while number < NUM_STEPS:
                if how == "gate" and number == at:
                    # The steps before are known; else the guard would wait for them behind the gate.
                    fake_cuda.drain()
                    fake_cuda.set_gate(is_open=False)
                if how == "gate" and number == at + RUN_AHEAD:
                    fake_cuda.set_gate(is_open=True)
                job.step(is_bad=number == at, is_synchronous=how == "sync")
                number += 1
        except HaltedError:
            pass
        finally:
            fake_cuda.set_gate(is_open=True)
        bad = [said.step for said in worn.said(StepDone) if said.body.nonfinite]
        assert not worn.monitor.context.guard.failures, worn.monitor.context.guard.failures
        assert all(bool(torch.isfinite(p).all()) for p in job.model.parameters())
    return agent, number, bad


def resumed(kind: str, directory: Path, *, is_scaled: bool = False) -> tuple[int, dict[str, Any]]:
    job = Job(kind, is_scaled=is_scaled)
    first = job.load(directory / "state")
    for _ in range(first, NUM_STEPS):
        job.step()
    return first, job.state()


def straight(kind: str, *, is_scaled: bool = False) -> dict[str, Any]:
    job = Job(kind, is_scaled=is_scaled)
    for _ in range(NUM_STEPS):
        job.step()
    return job.state()


CASES = [
    ("adamw", 3, "sync"),
    ("adamw", 7, "gate"),
    ("momentum", 0, "gate"),
    ("foreach", 3, "free"),
]
ALL = [
    (kind, at, how)
    for kind in OPTIMIZERS
    for at in (0, 3, 7)
    for how in ("sync", "free", "gate")
    if how != "gate" or kind not in WAITING
]


@pytest.mark.parametrize(
    ("kind", "at", "how"),
    [pytest.param(*case, marks=() if case in CASES else pytest.mark.release) for case in ALL],
)
def test_the_weights_stay_finite_and_the_resumed_run_has_the_same_bits(kind, at, how, tmp_path):
    agent, num_made, bad = halted(kind, at, how, tmp_path)
    assert [(at, "nonfinite", False)] == agent.held
    assert [at] == bad, "the step that was bad is told, not the one at which that was learnt"
    assert num_made == at if kind in WAITING else at < num_made <= at + RUN_AHEAD
    first, state = resumed(kind, tmp_path)
    assert at == first
    assert [] == differences(straight(kind), state)


@pytest.mark.parametrize("how", ["free", pytest.param("gate", marks=pytest.mark.release)])
def test_gradients_that_go_bad_after_a_scaler_has_looked_are_left_out_too(how, tmp_path):
    agent, _, _ = halted("adamw", 3, how, tmp_path, is_scaled=True)
    assert [(3, "nonfinite", False)] == agent.held
    first, state = resumed("adamw", tmp_path, is_scaled=True)
    assert 3 == first
    assert [] == differences(straight("adamw", is_scaled=True), state)


def test_a_step_that_a_scaler_leaves_out_is_no_fault_and_ends_with_the_same_bits(tmp_path):
    def run() -> Job:
        job = Job("adamw", is_scaled=True)
        for number in range(4):
            job.optimizer.zero_grad()
            loss = job.model(torch.ones(6, 8, device="cuda")).square().mean() * (math.inf if number == 2 else 1.0)
            job.scaler.scale(loss).backward()
            if number > 1:
                job.scaler.unscale_(job.optimizer)
            job.scaler.step(job.optimizer)
            job.scaler.update()
        return job

    expected = run().state()
    with watched(tmp_path) as (_, agent):
        assert [] == differences(expected, run().state())
        assert [] == agent.held


@pytest.mark.parametrize(
    "kind", ["adamw", *(pytest.param(kind, marks=pytest.mark.release) for kind in ("momentum", "adam"))]
)
def test_a_flag_that_is_not_set_changes_no_bit_waits_for_nothing_and_is_taken_away(kind, tmp_path):
    expected = straight(kind)
    with watched(tmp_path) as (worn, agent):
        job = Job(kind)
        fake_cuda.syncs()
        with fake_cuda.closed():
            # Nobody may wait for the device: it does nothing.
            for _ in range(RUN_AHEAD):
                job.step()
            assert [] == fake_cuda.syncs()
        for _ in range(NUM_STEPS - RUN_AHEAD):
            job.step()
        assert [] == differences(expected, job.state())
        assert not hasattr(job.optimizer, "found_inf")
        assert [] == agent.held
        assert not worn.monitor.context.guard.failures


def test_an_optimizer_of_which_one_group_is_not_fused_is_given_no_flag():
    model = nn.Linear(4, 4).cuda()
    groups = [{"params": [model.weight]}, {"params": [model.bias], "fused": False, "foreach": True}]
    assert takes_flag(torch.optim.AdamW(model.parameters(), fused=True))
    assert not takes_flag(torch.optim.AdamW(groups, fused=True))
    assert not takes_flag(torch.optim.AdamW(model.parameters()))
    assert not takes_flag(torch.optim.RMSprop(model.parameters()))


def test_the_flag_is_sticky_and_a_scalers_own_is_not_written_to():
    flags, model = DeviceFlags(), nn.Linear(2, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    one, zero = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    seen, scalers = [], [None, torch.zeros((), device="cuda"), torch.full((), 2.0, device="cuda"), None]
    for step, (flag, theirs) in enumerate(zip([zero, zero, one, zero], scalers, strict=True)):
        if theirs is not None:
            optimizer.found_inf = theirs
        flags.give(optimizer, torch.device("cuda:0"), flag, step=step, is_torn=False)
        seen.append(optimizer.found_inf.item())
        flags.take_back(optimizer)
        assert getattr(optimizer, "found_inf", None) is theirs
        if theirs is not None:
            del optimizer.found_inf
    # The scaler leaves the third out by itself: what we read of it is no fault.
    assert [0.0, 0.0, 2.0, 0.0] == seen
    assert flags.left_out() is None
    for step, flag in enumerate([one, zero], start=4):
        flags.give(optimizer, torch.device("cuda:0"), flag, step=step, is_torn=False)
        seen.append(optimizer.found_inf.item())
        flags.take_back(optimizer)
    assert [1.0, 1.0] == seen[4:]
    assert flags.left_out().step == 4


def test_how_long_steps_waited_for_the_device_is_said_once(tmp_path):
    with watched(tmp_path), redirect_stderr(io.StringIO()) as written:
        job = Job("foreach")
        with fake_cuda.delayed(0.0005):
            for _ in range(SAID_AFTER + 4):
                job.step()
    said = [line for line in written.getvalue().splitlines() if "each step waits for the device" in line]
    assert 1 == len(said)
    assert " ms so far" in said[0]
