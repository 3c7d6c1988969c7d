"""Frozen modules beside the model: known by the script's own names, once training calls them at every step."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holter.records import Census, PackedTable, Phase


class Trainer:
    """Holds a frozen module as an attribute."""

    def __init__(self) -> None:
        self.reference = nn.Linear(4, 4).requires_grad_(False)


def components(worn) -> list[list[str]]:
    return [[component.name for component in o.body.components] for o in worn.said(Census)]


def run(worn, model, calls, *, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        for module, is_called in calls:
            if is_called(number):
                module(torch.ones(1, 4))
        assert worn.monitor.context.phases.phase is not Phase.EVALUATION
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def always(_: int) -> bool:
    return True


@pytest.mark.usefixtures("gloo")
def test_what_training_calls_at_every_step_is_known_by_its_variable(wear):
    worn = wear(world_size=2)
    trainer, vae = Trainer(), nn.Linear(4, 4).requires_grad_(False)
    model = DistributedDataParallel(nn.Linear(4, 2))
    run(worn, model, [(vae, always), (trainer.reference, always)], steps=6)
    last = worn.said(Census)[-1].body
    assert ["", "reference", "vae"] == components(worn)[-1]
    assert [True, False, False] == [component.is_trained for component in last.components]
    assert ["reference.weight", "reference.bias", "vae.weight", "vae.bias"] == [e.name for e in last.entries[2:]]
    assert [1, 1, 2, 2] == [entry.component for entry in last.entries[2:]]
    frozen = [o.body for o in worn.said(PackedTable) if o.body.tensor_class == "frozen"]
    assert 6 * 8 == len(frozen[-1].fingerprints)
    assert not worn.monitor.context.guard.failures


@pytest.mark.usefixtures("gloo")
def test_an_average_that_is_evaluated_now_and_then_is_the_ranks_own(wear):
    worn = wear(world_size=2)
    average, unused = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4).requires_grad_(False)
    model = DistributedDataParallel(nn.Linear(4, 2))
    run(worn, model, [(average, lambda number: number % 2 == 0)], steps=12)
    assert unused is not average
    assert all(names == [""] for names in components(worn))


@pytest.mark.usefixtures("gloo")
def test_a_frozen_part_of_the_model_is_no_component(wear):
    worn = wear(world_size=2)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    backbone = inner[0].requires_grad_(False)
    run(worn, DistributedDataParallel(inner), [(backbone, always)], steps=6)
    assert all(names == [""] for names in components(worn))


def test_a_second_model_that_trains_has_its_variables_name(worn):
    actor, critic = nn.Linear(4, 2), nn.Linear(4, 1)
    for model in (actor, critic):
        worn.monitor.add_model(model)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    (actor(torch.ones(1, 4)).sum() + critic(torch.ones(1, 4)).sum()).backward()
    optimizer.step()
    assert ["weight", "bias", "critic.weight", "critic.bias"] == [e.name for e in worn.said(Census)[-1].body.entries]
