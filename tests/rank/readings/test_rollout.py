"""What generates is held against what trains, tensor by tensor and bit for bit."""

import copy
from collections.abc import Mapping

import torch
from torch import nn

from holter.records import Rollout


def bodies(worn) -> list[Rollout]:
    return [one.body for one in worn.said(Rollout)]


def told(worn, rollout: nn.Module | Mapping[str, torch.Tensor]) -> Rollout | None:
    worn.monitor.logs.log({"rollout": rollout})
    found = bodies(worn)
    return found[-1] if found else None


def step(model: nn.Module, factor: float = 1.5) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def made(worn) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    worn.monitor.add_model(model)
    return model, copy.deepcopy(model)


def test_a_sampler_that_is_pushed_each_time_is_equal(worn):
    model, sampler = made(worn)
    for _ in range(3):
        sampler.load_state_dict(model.state_dict())
        found = told(worn, sampler)
        assert (4, 0, 0, 0) == (found.num_equal, found.stale.count, found.other.count, found.missing.count)
        step(model)
    assert found.num_moved == 4


def test_one_that_is_never_pushed_falls_behind(worn):
    model, sampler = made(worn)
    ages = []
    for _ in range(4):
        found = told(worn, sampler)
        ages.append((found.behind, found.stale.count))
        step(model)
    assert [(0, 0), (1, 4), (2, 4), (3, 4)] == ages


def test_one_that_is_pushed_in_part_names_the_rest(worn):
    model, sampler = made(worn)
    told(worn, sampler)
    step(model)
    sampler[0].load_state_dict(model[0].state_dict())
    found = told(worn, sampler)
    assert (2, ["1.bias", "1.weight"]) == (found.num_equal, found.stale.names)


def test_other_weights_missing_ones_and_another_dtype(worn):
    model, sampler = made(worn)
    step(sampler, 7.0)
    assert 4 == told(worn, sampler).other.count
    weights = {f"module.{name}": value for name, value in model.state_dict().items() if name != "1.weight"}
    found = told(worn, weights)
    assert (3, ["1.weight"]) == (found.num_equal, found.missing.names)
    found = told(worn, copy.deepcopy(model).bfloat16())
    assert (0, 4, "bfloat16") == (found.num_equal, found.cast.count, found.cast_to)


def test_tied_weights_are_not_missing_and_names_of_its_own_are_not_compared(worn):
    model = nn.Sequential(nn.Embedding(6, 6), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    worn.monitor.add_model(model)
    found = told(worn, {"0.weight": model[0].weight.detach().clone()})
    assert (1, 0) == (found.num_equal, found.missing.count)
    before = len(bodies(worn))
    told(worn, {"blocks.qkv": torch.zeros(3)})
    assert before == len(bodies(worn))


def test_nothing_is_changed_by_it(worn):
    model, sampler = made(worn)
    state, kept = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    told(worn, sampler)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
