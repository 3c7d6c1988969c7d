"""An averaged copy is found beside its model, in whatever form it comes."""

import copy
import math

import pytest
import torch
from torch import nn

from holter.rank.hooks.logs import MAX_AVERAGED_TENSORS, AverageReader, named_tensors


class Shadow:
    """As libraries of averages keep it: a list."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow_params = [parameter.detach().clone() for parameter in model.parameters()]


def doubled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


FORMS = [
    copy.deepcopy,
    torch.optim.swa_utils.AveragedModel,
    Shadow,
    lambda model: {name: value.clone() for name, value in model.state_dict().items()},
    lambda model: {f"module.{name}": value.clone() for name, value in model.state_dict().items()},
]


@pytest.mark.parametrize("form", FORMS)
def test_distance_and_movement(worn, form):
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(MAX_AVERAGED_TENSORS)))
    worn.monitor.add_model(model)
    average, reader = form(model), AverageReader(worn.monitor.context)
    assert {"ema.distance": 0.0} == dict(reader.read(named_tensors(average)))
    doubled(model)
    told = dict(reader.read(named_tensors(average)))
    assert 0.0 == told["ema.moved"]
    assert math.isclose(0.5, told["ema.distance"])
    for value in named_tensors(average).values():
        value.data.mul_(1.5)
    told = dict(reader.read(named_tensors(average)))
    assert 1.0 == told["ema.moved"]
    # Times 1.5 rounds in float32.
    assert math.isclose(0.25, told["ema.distance"], rel_tol=1e-6)


def test_the_live_model_itself_is_no_copy(worn):
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    assert {} == dict(AverageReader(worn.monitor.context).read(named_tensors(model)))


@pytest.mark.parametrize("thing", [3, "text", [torch.ones(2)], {"decay": 0.99}, None])
def test_what_is_no_copy_has_no_tensors(thing):
    assert {} == named_tensors(thing)


def test_tensors_on_a_device_are_left_alone(worn):
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    average = {name: value.to("meta") for name, value in model.state_dict().items()}
    assert {} == dict(AverageReader(worn.monitor.context).read(average))
