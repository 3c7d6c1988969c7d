"""Clipping by the norm."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from holter.records import StepDone


def train(worn, model: nn.Module, limit: float, clip=None) -> dict[str, float]:
    worn.monitor.add_model(model)
    worn.model = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).pow(2).sum().backward()
    worn.norm = (clip or torch.nn.utils.clip_grad_norm_)(model.parameters(), limit)
    optimizer.step()
    return worn.said(StepDone)[-1].body.numbers


def test_norm_and_limit_are_told(worn):
    numbers = train(worn, nn.Linear(4, 4), 0.5)
    assert math.isclose(numbers["clip.norm"], float(worn.norm), rel_tol=1e-6)
    assert 0.5 == numbers["clip.limit"]
    assert 0.0 == numbers["clip.is_sharded"]
    gradients = [p.grad.flatten() for p in worn.model.parameters()]
    assert math.isclose(0.5, torch.cat(gradients).norm().item(), rel_tol=1e-4)


def test_a_list_of_parameters_and_the_other_name_of_the_function_do_as_well(worn):
    clip = torch.nn.utils.clip_grad.clip_grad_norm_
    numbers = train(worn, nn.Linear(4, 4), 2.0, lambda parameters, limit: clip(list(parameters), limit))
    assert 2.0 == numbers["clip.limit"]


def test_without_clipping_nothing_is_told(worn):
    assert "clip.norm" not in train(worn, nn.Linear(4, 4), 1.0, lambda *_: 0.0)


def test_of_two_calls_the_one_that_clips_harder_is_told(worn):
    def twice(parameters, limit):
        parameters = list(parameters)
        torch.nn.utils.clip_grad_norm_(parameters[:1], limit)
        return torch.nn.utils.clip_grad_norm_(parameters[1:], 100 * limit)

    assert 1.0 == train(worn, nn.Linear(4, 4), 1.0, twice)["clip.limit"]


@pytest.mark.usefixtures("gloo")
def test_the_norm_of_sharded_parameters_is_the_global_one(worn):
    model = nn.Linear(4, 4)
    fully_shard(model)
    numbers = train(worn, model, 1.0)
    assert math.isclose(numbers["clip.norm"], worn.norm.full_tensor().item(), rel_tol=1e-6)
    assert 0.0 == numbers["clip.is_sharded"]
