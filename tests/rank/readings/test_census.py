"""Names, shapes, frozenness, buffers, and which optimizer holds what."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holter.records import Census, Mark

pytestmark = pytest.mark.usefixtures("swept")


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def census(worn) -> list[Census]:
    return [observation.body for observation in worn.said(Census)]


def test_every_tensor_is_told_as_it_is(worn):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1).double())
    model[0].bias.requires_grad_(False)
    model[2].float()
    worn.monitor.add_model(model)
    one, other = torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)
    step(model, one, other)
    step(model, one, other)
    told = census(worn)[-1]
    entries = {entry.name: entry for entry in told.entries}
    assert ("Sequential", False, ["Adam", "SGD"]) == (told.wrapper, told.is_replicated, told.optimizers)
    assert ((3, 4), "float32", True, False, 0) == (
        entries["0.weight"].shape,
        entries["0.weight"].dtype,
        entries["0.weight"].requires_grad,
        entries["0.weight"].is_buffer,
        entries["0.weight"].optimizer,
    )
    assert not entries["0.bias"].requires_grad
    assert [1, 1, -1, -1] == [entries[name].optimizer for name in ("1.weight", "1.bias", "2.weight", "2.bias")]
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} == {e.name for e in told.entries if e.is_buffer}
    assert "int64" == entries["1.num_batches_tracked"].dtype


def test_the_order_of_gradients_is_told_from_the_loss_down(worn):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    worn.monitor.add_model(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    order = [census(worn)[-1].entries[index].name for index in census(worn)[-1].backward_order]
    assert {"1.weight", "1.bias"} == set(order[:2])
    assert {"0.weight", "0.bias"} == set(order[2:])


def test_a_layer_that_thaws_makes_a_new_census(worn):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    model[0].requires_grad_(True)
    for _ in range(16):
        step(model, optimizer)
    frozen = [[entry.name for entry in told.entries if not entry.requires_grad] for told in census(worn)]
    assert [["0.weight", "0.bias"], []] == frozen


def test_many_tensors_come_in_parts(worn):
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(1200)])
    worn.monitor.add_model(model)
    torch.stack(list(model)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    told = census(worn)
    assert [(0, 3, 500), (1, 3, 500), (2, 3, 200)] == [(part.part, part.parts, len(part.entries)) for part in told]
    assert [str(number) for number in range(1200)] == [entry.name for part in told for entry in part.entries]
    assert [1200, 0, 0] == [len(part.backward_order) for part in told]


def test_parameters_of_an_optimizer_that_no_model_has_are_counted(worn):
    model, loose = nn.Linear(4, 2), nn.Parameter(torch.ones(3))
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    (model(torch.ones(2, 4)).sum() + loose.sum()).backward()
    optimizer.step()
    told = census(worn)[-1]
    assert ([3], [1], [1]) == (told.num_held, told.num_foreign, told.num_foreign_with_gradient)


def test_parameters_that_were_replaced_after_the_optimizer_was_built_are_foreign(worn):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight, model.bias = (nn.Parameter(p.detach().clone()) for p in (model.weight, model.bias))
    worn.monitor.add_model(model)
    step(model, optimizer)
    told = census(worn)[-1]
    assert ([2], [2], [0]) == (told.num_held, told.num_foreign, told.num_foreign_with_gradient)
    assert [-1, -1] == [entry.optimizer for entry in told.entries]
    assert not told.components[0].is_trained


@pytest.mark.usefixtures("gloo")
def test_a_model_that_was_sharded_after_the_optimizer_was_built_is_not_the_optimizers(worn):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    step(model, optimizer)
    told = census(worn)[-1]
    assert [2] == told.num_foreign
    assert [(-1, True), (-1, True)] == [(entry.optimizer, entry.is_sharded) for entry in told.entries]
    assert not any(entry.is_replicated for entry in told.entries)


def test_values_that_are_odd_and_buffers_that_are_progressions_are_told(worn):
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.bias)
    model.register_buffer("inv_freq", 10.0 ** -torch.arange(8).float(), persistent=False)
    worn.monitor.add_model(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    entries = {entry.name: entry for entry in census(worn)[-1].entries}
    assert Mark.ZERO in Mark(entries["bias"].marks)
    buffer = entries["inv_freq"]
    assert ("geometric", 8, False, "Linear") == (
        buffer.pattern,
        buffer.num_distinct,
        buffer.is_persistent,
        buffer.module_class,
    )


def test_what_the_user_declares_frozen_is_told(wear):
    worn = wear(frozen=("encoder.*",))
    model = nn.Linear(4, 2)
    worn.monitor.add_model(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ["encoder.*"] == census(worn)[-1].declared_frozen
