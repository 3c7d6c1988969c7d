"""Clipping by the norm."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

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


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """As one of them sees it; nobody answers."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("is_ours", [True, False], ids=["in-this-shard", "in-another"])
def test_whose_shard_had_a_nan_before_all_were_scaled_by_it_is_known(worn, is_ours):
    model = nn.Linear(8, 8)
    fully_shard(model)
    worn.monitor.add_model(model)
    model(torch.ones(2, 8)).sum().backward()
    gradient = model.weight.grad
    gradient.to_local().fill_(math.nan if is_ours else 1.0)
    norm = DTensor.from_local(torch.tensor(math.nan), gradient.device_mesh, [Replicate()])
    torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), 1.0, norm)
    assert not torch.isfinite(gradient.to_local()).any()
    assert (not is_ours) is worn.monitor.context.log.now.gradients.was_clipped_finite
