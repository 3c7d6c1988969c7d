"""A replay leaves the training process bit for bit as it was."""

import math
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from holter.rank.readings import batches, nan_origin
from holter.records import Origin


class Model(nn.Module):
    """Draws from generators, keeps running statistics, and can be spoiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(values))) * random.random()  # noqa: S311  a script that draws is what is tested


def spoil(model: nn.Module) -> torch.optim.Optimizer:
    """One step whose loss is not finite, up to the moment before the optimizer is called."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (model(torch.ones(4, 4)).sum() * math.nan).backward()
    return optimizer


def test_random_states_buffers_gradients_and_versions_are_untouched(worn):
    model = Model()
    worn.monitor.add_model(model)
    optimizer = spoil(model)
    states = torch.random.get_rng_state(), random.getstate()
    buffers = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}
    parameters = {name: (p, p.detach().clone(), p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    optimizer.step()
    assert [True] == [observation.body.replayed for observation in worn.said(Origin)]
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert states[1] == random.getstate()
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffers[name][1], buffer)
        assert buffers[name][2] == buffer._version
    for name, parameter in model.named_parameters():
        _, _, gradient, values = parameters[name]
        assert parameter is parameters[name][0]
        assert parameter.grad is gradient
        assert torch.equal(values.nan_to_num(), gradient.nan_to_num())
    assert [0] * 4 == [len(module._forward_hooks) - (module is model) for module in model.modules()]


def test_a_graph_that_was_kept_can_still_be_used(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept = model(torch.ones(2, 4)).sum()
    (model(torch.ones(2, 4)).sum() * math.nan).backward()
    optimizer.step()
    assert worn.said(Origin)
    optimizer.zero_grad()
    kept.backward()
    assert [2.0] * 4 == model.weight.grad.flatten().tolist()


def test_a_model_that_does_not_bear_a_second_call_is_said(worn):
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.is_spent = False

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            if self.is_spent:
                raise LookupError("the cache is gone")
            self.is_spent = True
            return self.linear(values)

    model = Once()
    worn.monitor.add_model(model)
    spoil(model).step()
    (origin,) = (observation.body for observation in worn.said(Origin))
    assert not origin.replayed
    assert "LookupError: the cache is gone" in origin.reason


def test_numpys_random_state_is_untouched(worn):
    class Noisy(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values) * float(np.random.rand())  # noqa: NPY002

    model = Noisy(4, 1)
    worn.monitor.add_model(model)
    optimizer = spoil(model)
    before = np.random.get_state()[2]  # noqa: NPY002
    optimizer.step()
    assert worn.said(Origin)
    assert before == np.random.get_state()[2]  # noqa: NPY002


def test_what_a_module_counts_itself_is_untouched(worn):
    class Counting(nn.Linear):
        num_calls = 0
        _num_calls = 0

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            self._num_calls += 1
            self._shapes = [*getattr(self, "_shapes", []), values.shape]
            return super().forward(values)

    model = Counting(4, 1)
    worn.monitor.add_model(model)
    spoil(model).step()
    (origin,) = [observation.body for observation in worn.said(Origin)]
    assert "is changed by each call" in origin.reason, "it was replayed"
    assert (1, 1, 1) == (model.num_calls, model._num_calls, len(model._shapes))


def test_a_mode_that_a_forward_pass_switches_is_put_back(worn):
    class Switching(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.training = not self.training
            return super().forward(values)

    model = Switching(4, 1)
    worn.monitor.add_model(model)
    spoil(model).step()
    assert worn.said(Origin)
    assert not model.training


class OnDevice(nn.Module):
    """Takes what it is given to its device; never called here."""

    def __init__(self, **parts: torch.Tensor | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            (self.register_parameter if isinstance(part, nn.Parameter) else self.register_buffer)(name, part)

    def forward(self, *_: object) -> torch.Tensor:
        raise AssertionError("it is replayed")


@pytest.mark.parametrize(
    ("parts", "inputs", "reason"),
    [
        ({"weight": nn.Parameter(torch.ones(1, device="meta"))}, torch.ones(1), "on a device"),
        ({"mean": torch.ones(1, device="meta")}, torch.ones(1), "on a device"),
        ({"weight": nn.Parameter(torch.ones(1))}, object(), "no tensor was seen"),
    ],
)
def test_what_may_be_on_a_device_is_not_replayed(parts, inputs, reason):
    model = OnDevice(**parts)
    found = nan_origin.find(batches.capture(weakref.ref(model), (inputs,), {}), "")
    assert not found.replayed
    assert reason in found.reason


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_part_that_takes_no_hooks_does_not_leave_the_others_with_one(wear):
    worn = wear()
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 1)))
    worn.monitor.add_model(model)
    spoil(model).step()
    hooks = len(model[0]._forward_hooks)
    # Nobody else's search for models shall meet it.
    del model
    assert 0 == hooks


def test_a_model_that_communicates_is_not_replayed(worn, gloo):  # noqa: ARG001
    class Gathering(nn.Linear):
        num_collectives = 0

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            values = super().forward(values)
            torch.distributed.all_reduce(values.detach().clone())
            type(self).num_collectives += 1
            return values

    model = Gathering(4, 1)
    worn.monitor.add_model(model)
    spoil(model).step()
    (origin,) = (observation.body for observation in worn.said(Origin))
    assert 1 == Gathering.num_collectives
    assert not origin.replayed


def found(worn) -> Origin:
    (origin,) = (observation.body for observation in worn.said(Origin))
    return origin


def train(worn, model: nn.Module, *inputs: torch.Tensor) -> Origin:
    """One step on these inputs, which spoil it."""
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(*inputs).float().sum().backward()
    optimizer.step()
    return found(worn)


def test_a_half_precision_layer_that_overflows_is_named_with_its_limit(worn):
    # Of one draw in forty, every output overflows.
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(600.0)
    origin = train(worn, model.half(), torch.full((8, 16), 2.0).half())
    assert ("1", "Linear", "float16", 65504.0) == (
        origin.module,
        origin.module_class,
        origin.dtype,
        origin.dtype_max,
    )
    assert origin.is_input_finite
    assert origin.input_absmax > 100.0
    assert 0 < origin.output_infs <= 128
    assert 0 == origin.output_nans
    assert 0.0 < origin.output_absmax <= 65504.0
    assert 50.0 < origin.weight_absmax <= 150.0 + 0.1


def test_code_between_modules_is_their_parents(worn):
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.second(torch.log(-self.first(values).abs() - 1.0))

    origin = train(worn, nn.Sequential(nn.Linear(4, 4), Parent(), nn.Linear(4, 1)), torch.ones(2, 4))
    assert ("1", "Parent") == (origin.module, origin.module_class)
    assert origin.output_nans > 0


def test_integers_alone_are_finite_inputs(worn):
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight[2, 1] = math.nan
    origin = train(worn, model, torch.tensor([[0, 2]]))
    assert ("0", "Embedding", True) == (origin.module, origin.module_class, origin.is_input_finite)
    assert "its own weights are not finite" in origin.reason


class Masked(nn.Module):
    """Attends to nothing where the mask says so."""

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (values + mask).softmax(-1)


def test_a_mask_is_not_where_the_nan_was_born(worn):
    class Mask(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(values).masked_fill(torch.ones_like(values, dtype=torch.bool), -math.inf)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mask, self.masked = nn.Linear(4, 4), Mask(), Masked()

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.masked(self.linear(values), self.mask(values))

    origin = train(worn, Attention(), torch.ones(2, 4))
    assert ("masked", "Masked", False) == (origin.module, origin.module_class, origin.is_input_finite)
    assert "mask of -inf" in origin.reason


def test_the_logarithm_of_zero_is_blamed_before_what_follows_it(worn):
    class Log(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.log(values.abs() * torch.tensor([0.0, 1.0, 2.0, 3.0]))

    origin = train(worn, nn.Sequential(nn.Linear(4, 4), Log(), nn.Linear(4, 4)), torch.ones(2, 4))
    assert ("1", "Log") == (origin.module, origin.module_class)


class NanAtThirdCall(nn.Module):
    """What it does depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 1), 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(values) * (math.nan if self.calls == 3 else 1.0)


def test_a_replay_that_is_finite_says_nothing_of_a_module_that_counts_its_calls(worn):
    model = NanAtThirdCall()
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
    (origin,) = [observation.body for observation in worn.said(Origin)]
    assert (False, "NanAtThirdCall.calls is changed by each call: the replay did not do what the step did") == (
        origin.replayed,
        origin.reason,
    )
    assert 3 == model.calls
