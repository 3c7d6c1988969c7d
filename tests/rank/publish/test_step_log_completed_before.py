"""How far a run had come before its first step here: told where somebody counts, and never guessed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holter.rank.framework import Framework
from holter.rank.publish import step_log
from holter.records import FirstStep


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def told(worn) -> list[tuple[int, int | None, str]]:
    return [(said.step, said.body.completed, said.body.source) for said in worn.said(FirstStep)]


def restored(kind: type[torch.optim.Optimizer], num_steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As a script has them that loaded its own checkpoint."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    train(model, optimizer, num_steps)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.load_state_dict(state)
    return model, optimizer


def test_an_optimizer_that_was_restored_says_how_many_steps_it_has_counted(wear):
    model, optimizer = restored(torch.optim.AdamW, 3)
    worn = wear()
    train(model, optimizer, 2)
    assert [(0, 3, "AdamW")] == told(worn), "once"


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_one_that_has_no_count_says_nothing(wear, kind):
    model, optimizer = restored(kind, 3 if kind is torch.optim.SGD else 0)
    worn = wear()
    train(model, optimizer, 1)
    assert [(0, None, "")] == told(worn)


def test_a_count_on_a_device_is_not_waited_for(wear):
    _, optimizer = restored(torch.optim.AdamW, 3)
    worn = wear()
    for state in optimizer.state.values():
        state["step"] = torch.empty((), device="meta")
    step_log.tell_completed_before(worn.monitor.context, optimizer)
    assert [(0, None, "")] == told(worn)


class Counting(Framework):
    """One that counts, as it is told to."""

    owner = "Trainer"

    def __init__(self, count: Callable[[Any], int | None]) -> None:
        self.count_steps = count


def test_the_frameworks_own_count_goes_before_the_optimizers(wear):
    model, optimizer = restored(torch.optim.AdamW, 3)
    worn = wear()
    worn.monitor.context.frameworks.known = [Counting(lambda stepped: 7 if stepped is optimizer else None)]
    train(model, optimizer, 1)
    assert [(0, 7, "Trainer")] == told(worn)


def test_a_count_that_cannot_be_had_costs_no_step(wear):
    model, optimizer = restored(torch.optim.AdamW, 3)
    worn = wear()

    def fail(_: object) -> None:
        raise RuntimeError("half built")

    worn.monitor.context.frameworks.known = [Counting(fail)]
    train(model, optimizer, 2)
    assert [] == told(worn)
    assert 2 == worn.monitor.context.log.step
