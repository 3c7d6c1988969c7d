"""A NaN is followed to where it came from: the batch, a module, backward; and a healthy step is left in peace."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holter.records import Origin, StepDone


class Careless(nn.Module):
    """Takes the logarithm of whatever it is given."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.log(values)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.careless = Careless()
        self.is_careless = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.linear(values)
        return self.careless(-values.abs() - 1.0) if self.is_careless else values


class BackwardNan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):  # noqa: ARG004
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        return gradient * math.nan


def model_with(block: Block) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"inner": block})["inner"], nn.Linear(4, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()


def bad(worn) -> list[tuple[int, set[str]]]:
    said = worn.said(StepDone)
    return [(o.step, {entry.where for entry in o.body.nonfinite}) for o in said if o.body.nonfinite]


def test_a_nan_in_the_batch_is_found_there(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        inputs = torch.ones(2, 4)
        if number == 2:
            inputs[1, 3] = math.nan
        step(model, optimizer, inputs)
    assert [(2, {"input", "loss", "gradient", "reduced_gradient"})] == bad(worn)
    entry = next(e for e in worn.said(StepDone)[2].body.nonfinite if e.where == "input")
    assert ("input", 1, 0, 8, 0) == (entry.name, entry.nans, entry.infs, entry.numel, entry.healthy_steps)
    assert not worn.said(Origin), "the batch explains it: there is nothing to replay for"


def test_a_nan_made_in_forward_names_the_innermost_module(worn):
    block = Block()
    model = model_with(block)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, torch.ones(2, 4))
    block.is_careless = True
    step(model, optimizer, torch.ones(2, 4))
    (origin,) = (observation.body for observation in worn.said(Origin))
    assert ("1.careless", "Careless", True) == (origin.module, origin.module_class, origin.replayed)
    assert origin.is_input_finite
    assert origin.input_absmax >= 1.0


def test_a_nan_made_outside_the_model_is_no_modules_fault(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, torch.ones(2, 4))
    (model(torch.ones(2, 4)).sum() * math.nan).backward()
    optimizer.step()
    (origin,) = (observation.body for observation in worn.said(Origin))
    assert ("", True) == (origin.module, origin.replayed)
    assert "every module's output is finite" in origin.reason


def test_inputs_that_were_changed_since_are_not_replayed(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(2, 4)
    loss = model(inputs).sum() * math.nan
    loss.backward()
    with torch.no_grad():
        inputs.add_(1.0)
    optimizer.step()
    (origin,) = (observation.body for observation in worn.said(Origin))
    assert not origin.replayed
    assert "changed in place" in origin.reason


def test_a_nan_made_in_backward_is_ordered_from_the_loss_down(worn):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
            self.is_bad = False

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            values = self.second(self.first(values))
            return self.third(BackwardNan.apply(values) if self.is_bad else values)

    model = Model()
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, torch.ones(2, 4))
    model.is_bad = True
    step(model, optimizer, torch.ones(2, 4))
    done = worn.said(StepDone)[1].body
    local = sorted((entry for entry in done.nonfinite if entry.where == "gradient"), key=lambda entry: entry.order)
    assert {"second.weight", "second.bias"} == {entry.name for entry in local[:2]}
    assert {"first.weight", "first.bias"} == {entry.name for entry in local[2:]}
    assert math.isfinite(done.loss)
    assert "loss" not in {entry.where for entry in done.nonfinite}


def test_a_mask_that_is_always_infinite_is_known_as_such(worn):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (self.linear(values) + mask).softmax(-1)

    model = Masked()
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.tensor([0.0, 0.0, 0.0, -math.inf])
    for factor in (1.0, 1.0, 1.0, math.nan):
        optimizer.zero_grad()
        (model(torch.ones(2, 4), mask=mask).pow(2).sum() * factor).backward()
        optimizer.step()
    done = worn.said(StepDone)
    assert [[], [], []] == [observation.body.nonfinite for observation in done[:3]]
    entry = next(e for e in done[3].body.nonfinite if e.where == "input")
    assert ("mask", 0, 1, 3) == (entry.name, entry.nans, entry.infs, entry.healthy_steps)
    assert 1 == len(worn.said(Origin)), "a mask explains nothing: the step is replayed"


def test_a_run_that_goes_on_with_its_nan_is_not_replayed_for_ever(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * math.nan).backward()
        optimizer.step()
    assert 3 == len(worn.said(Origin))


def test_of_several_micro_batches_the_one_with_the_nan_is_questioned(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in (1.0, math.nan, 1.0):
        model(torch.full((2, 4), factor)).sum().backward()
    optimizer.step()
    assert {"input"} <= bad(worn)[0][1]


def test_a_nan_in_gradients_that_the_script_made_itself_is_seen(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.full((2, 4), math.nan)).sum()
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()
    assert bad(worn)


def test_a_nan_made_in_a_closure_is_seen(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), math.nan)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert bad(worn)


def test_a_nan_is_told_at_its_step_with_two_optimizers_of_other_pace(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    often, seldom = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    for number, optimizer in enumerate([often, often, seldom] * 4):
        step(model, optimizer, torch.full((2, 4), math.nan if number == 10 else 1.0))
    assert 10 == bad(worn)[0][0]


def test_a_nan_among_the_labels_that_a_loader_gave_is_found_there(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    targets = torch.zeros(12, 1)
    targets[9] = math.nan
    for values, wanted in DataLoader(TensorDataset(torch.ones(12, 4), targets), batch_size=4):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(values), wanted).backward()
        optimizer.step()
    told = [entry for o in worn.said(StepDone) if o.step == 2 for entry in o.body.nonfinite if entry.where == "input"]
    assert [entry.name for entry in told] == ["batch[1]"]


def test_labels_that_are_always_partly_missing_are_known_as_such(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    targets = torch.full((12, 1), math.nan)
    for number, (values, _) in enumerate(DataLoader(TensorDataset(torch.ones(12, 4), targets), batch_size=4)):
        optimizer.zero_grad()
        (model(values).sum() * (math.inf if number == 2 else 1.0)).backward()
        optimizer.step()
    told = [entry for o in worn.said(StepDone) if o.step == 2 for entry in o.body.nonfinite if entry.where == "input"]
    assert all(entry.healthy_steps > 0 for entry in told)


def test_what_the_script_makes_of_a_batch_is_looked_at_in_its_place(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(24.0).view(6, 4), torch.ones(6)), batch_size=2)
    for number, (inputs, _) in enumerate(loader):
        step(model, optimizer, torch.zeros_like(inputs) if number == 2 else inputs)
    told = [o.body.numbers for o in worn.said(StepDone)]
    (leaf,) = {name for name in told[0] if name.endswith("absmax") and told[0][name] == 7.0}
    assert [7.0, 15.0, 0.0] == [numbers[leaf] for numbers in told]
