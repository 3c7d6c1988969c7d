"""What an ordinary step costs the training thread whatever is read, counted instead of timed: calls of Python in holter's hooks, the same at every run."""

import statistics
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holter
import holter_kernels
from holter.rank.publish.budget import StepPlan

OURS = tuple(str(Path(package.__file__ or "").parent) for package in (holter, holter_kernels))
AROUND = frozenset({"backward", "step", "within"})
"""Functions of ours around the script's own."""
SETTLED, COUNTED = 130, 16


class Agent:
    """What hooks ask of a rank's part in halts, where the guard is on and nobody orders a halt."""

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False


def is_within_ours(frame: FrameType | None) -> bool:
    """Whether this is a call of a function of ours, or of another that ours calls."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS) and frame.f_code.co_name not in AROUND:
            return True
        frame = frame.f_back
    return False


def calls_of_a_step(worn, model: nn.Module) -> float:
    """Of the ordinary one, once it is settled; it reads and compares everything."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    schedule, inputs, num_calls = worn.monitor.context.schedule, torch.randn(4, 8), 0
    worn.monitor.context.hold.agent = Agent()
    found: list[int] = []

    def step() -> None:
        # However busy the machine is.
        schedule.plan = StepPlan()
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls
        num_calls += event == "call" and is_within_ours(frame)

    for _ in range(SETTLED):
        step()
    worn.forget()
    before = sys.getprofile()
    for _ in range(COUNTED):
        num_calls = 0
        sys.setprofile(count)
        step()
        sys.setprofile(before)
        found.append(num_calls)
    return statistics.median(found)


def network(num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))


@pytest.fixture
def native() -> None:
    """Without a compiler a step costs what it does."""
    pytest.importorskip("holter_kernels._native")
    pytest.importorskip("holter.page._latch")


@pytest.mark.usefixtures("native", "swept")
def test_a_step_of_one_rank_makes_few_calls_however_many_tensors_there_are(wear):
    worn = wear(budget=0.01)
    worn.monitor.add_model(model := network(40))
    assert calls_of_a_step(worn, model) < 345


@pytest.mark.usefixtures("native", "swept", "gloo")
def test_a_step_that_is_compared_makes_few_calls_however_many_tensors_there_are(wear):
    worn = wear(world_size=2, budget=0.01)
    assert calls_of_a_step(worn, DistributedDataParallel(network(40))) < 585
