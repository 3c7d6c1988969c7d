"""Names, shapes, frozenness, buffers, and which optimizer holds what."""

import torch
from torch import nn

from holter.records import Census


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
