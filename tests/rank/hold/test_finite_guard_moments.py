"""When gradients are asked whether they are finite: between a closure and what it is for, and after a script has unscaled them itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


class HeldError(BaseException):
    """The process would end here."""


class Agent:
    """Ends whoever is held, and remembers where and whether the state was torn."""

    def __init__(self, worn: Any) -> None:
        self._worn = worn
        self.held: list[tuple[int, str, bool]] = []

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False

    def hold(self, step: int, why: str, num_skipped: int = 0) -> None:
        assert num_skipped == 0
        self.held.append((step, why, self._worn.monitor.is_torn()))
        raise HeldError


@pytest.fixture
def agent(worn) -> Agent:
    worn.monitor.context.hold.agent = Agent(worn)
    return worn.monitor.context.hold.agent


class Subclass(torch.optim.AdamW):
    """As scripts have them."""

    def step(self, closure=None):
        return super().step(closure)


class Perturbing(torch.optim.SGD):
    """Steps away from the weights before it asks for gradients, as sharpness-aware optimizers do."""

    def step(self, closure=None):
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        return super().step(closure)


class Own(torch.optim.Optimizer):
    """None of torch's: what it has written when it calls the closure is not known."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure=None):
        loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad)
        return loss


def train(
    worn, make: Callable[[Any], torch.optim.Optimizer], bad_step: int, *, by_name: bool = False
) -> tuple[nn.Module, int]:
    """Steps with closures, until held; how many were made."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = make(model.parameters())
    for number in range(4):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean() * (float("nan") if number == bad_step else 1.0)
            loss.backward()
            return loss

        try:
            result = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        except HeldError:
            return model, number
        assert result is not None, "the step returns what the closure did"
    return model, 4


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("make", [lambda ps: torch.optim.SGD(ps, lr=0.1), lambda ps: Subclass(ps, lr=0.1)])
def test_a_nan_that_a_closure_makes_is_held_before_it_is_applied(worn, agent, make, by_name):
    model, number = train(worn, make, 2, by_name=by_name)
    assert (2, [(2, "nonfinite", False)]) == (number, agent.held)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("make", [lambda ps: Perturbing(ps, lr=0.1), Own, torch.optim.LBFGS])
def test_where_something_may_have_been_applied_before_the_closure_nothing_is_held(worn, agent, make):
    assert (4, []) == (train(worn, make, 2)[1], agent.held)


def test_closures_train_to_the_same_bits(wear):
    worn = wear()
    worn.monitor.context.hold.agent = Agent(worn)
    watched = train(worn, lambda ps: torch.optim.Adam(ps, lr=0.1), 9)[0].state_dict()
    worn.monitor.uninstall()
    torch.manual_seed(0)
    plain = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(4):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = plain(torch.ones(2, 4)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert all(torch.equal(watched[name], value) for name, value in plain.state_dict().items())


def test_while_a_closure_computes_nothing_is_torn_and_what_it_raises_passes(worn, agent):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def closure() -> torch.Tensor:
        seen.append(worn.monitor.is_torn())
        raise ValueError("the script's own")

    with pytest.raises(ValueError, match="the script's own"):
        optimizer.step(closure)
    assert ([False], False, []) == (seen, worn.monitor.is_torn(), agent.held)


@pytest.mark.parametrize("is_unscaled", [True, False])
def test_gradients_that_went_bad_after_the_script_unscaled_them_are_held(worn, agent, is_unscaled):
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    number = 0
    try:
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            if is_unscaled:
                scaler.unscale_(optimizer)
            if number == 1:
                model.weight.grad[0, 0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
    except HeldError:
        pass
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    # Without unscale_ the scaler looks at the last moment, and leaves the step out: that is its work, and no fault.
    assert ((1, [(1, "nonfinite", False)]) if is_unscaled else (2, [])) == (number, agent.held)


def test_a_step_that_a_scaler_leaves_out_after_unscaling_is_not_held(worn, agent):
    for make in (lambda ps: torch.optim.SGD(ps, lr=0.1), lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True)):
        model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
        worn.monitor.add_model(model)
        optimizer = make(model.parameters())
        for number in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean() * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert [] == agent.held
