"""The phase goes back to what it was, whoever interrupts whom."""

import torch
from torch import nn

from holter.records import Phase


class Outer(torch.optim.Optimizer):
    """An optimizer that drives another one."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure=None):  # noqa: ARG002
        self.inner.step()


def test_an_optimizer_inside_an_optimizer_leaves_the_phase(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    model(torch.ones(1, 4)).sum().backward()
    Outer(list(model.parameters())).step()
    assert Phase.OTHER is worn.reader.heartbeat().phase


def test_a_forward_pass_inside_backward_goes_back_to_backward(worn):
    shown = []
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)

    def look(_: torch.Tensor) -> None:
        model(torch.ones(1, 4))
        shown.append(worn.reader.heartbeat().phase)

    loss = model(torch.ones(1, 4)).sum()
    loss.register_hook(look)
    loss.backward()
    assert [Phase.BACKWARD] == shown
