"""Fingerprints of what must be equal on all replicas."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holter.records import Census, PackedTable, StepDone


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()


def tables(worn, tensor_class: str) -> list[PackedTable]:
    return [o.body for o in worn.said(PackedTable) if o.body.tensor_class == tensor_class]


@pytest.mark.usefixtures("gloo")
def test_equal_weights_have_equal_fingerprints_and_others_do_not(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, optimizer, torch.ones(1, 4))
    step(model, optimizer, torch.ones(1, 4))
    with torch.no_grad():
        model.module.weight[0, 0] = torch.nextafter(model.module.weight[0, 0], torch.tensor(math.inf))
    step(model, optimizer, torch.ones(1, 4))
    before = tables(worn, "parameters_before")
    assert before[0].root == before[1].root == tables(worn, "parameters_after")[0].root
    assert before[1].root != before[2].root
    assert before[1].fingerprints[8:] == before[2].fingerprints[8:], "the bias is as it was"
    assert before[1].fingerprints[:8] != before[2].fingerprints[:8]
    assert not worn.monitor.context.guard.failures


@pytest.mark.usefixtures("gloo")
def test_roots_are_told_with_the_step(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    assert {"parameters_before", "gradients", "parameters_after"} <= set(worn.said(StepDone)[0].body.roots)


def test_a_model_that_nobody_replicates_is_not_compared(wear):
    worn = wear(world_size=2)
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    assert [{}] == [o.body.roots for o in worn.said(StepDone)]


@pytest.mark.usefixtures("gloo")
def test_a_single_rank_compares_nothing(wear):
    worn = wear(world_size=1)
    model = DistributedDataParallel(nn.Linear(4, 2))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    assert not worn.said(PackedTable)
    assert [{}] == [o.body.roots for o in worn.said(StepDone)]


@pytest.mark.usefixtures("gloo")
def test_parameters_that_ddp_ignores_are_not_replicas(wear):
    worn = wear(world_size=2)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["1.weight"])
    model = DistributedDataParallel(inner)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    names = [entry.name for o in worn.said(Census) for entry in o.body.entries]
    assert ["0.weight", "0.bias", "1.bias"] == names[:3]
    assert "1.weight" not in names


@pytest.mark.usefixtures("gloo")
def test_a_model_that_is_no_replica_does_not_change_the_root(wear):
    worn = wear(world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, optimizer, torch.ones(1, 4))
    average = nn.Linear(4, 2)
    worn.monitor.add_model(average)
    step(model, optimizer, torch.ones(1, 4))
    first, second = tables(worn, "parameters_before")
    assert first.root == second.root


@pytest.mark.usefixtures("gloo")
def test_a_module_that_was_wrapped_before_anybody_watched_is_known_as_a_replica(wear):
    module = nn.Linear(4, 2)
    model = DistributedDataParallel(module)
    worn = wear(world_size=2)
    worn.monitor.add_model(module)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    assert "parameters_before" in worn.said(StepDone)[0].body.roots
