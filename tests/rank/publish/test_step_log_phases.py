"""The phase goes back to what it was, whoever interrupts whom."""

import time

import torch
from torch import nn

from holter.rank.publish.step_log import PhaseClock
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


def seconds_of(*phases: Phase) -> dict[str, float]:
    """A step of these, of 20 ms each."""
    clock = PhaseClock()
    clock.enter(Phase.OTHER)
    clock.take()
    for phase in phases:
        clock.enter(phase)
        time.sleep(0.02)
    return clock.take()


def test_the_batches_and_metrics_of_an_evaluation_are_a_part_of_it():
    calls = (Phase.EVALUATION, Phase.OTHER, Phase.DATA, Phase.EVALUATION, Phase.OTHER)
    found = seconds_of(*calls, Phase.FORWARD, Phase.OTHER)
    assert found["evaluation"] >= 0.1
    assert found["forward"] >= 0.02
    assert found["other"] >= 0.02
    assert found.get("data", 0.0) < 0.001


def test_the_batch_that_is_trained_on_after_an_evaluation_is_no_part_of_it():
    found = seconds_of(Phase.EVALUATION, Phase.DATA, Phase.FORWARD, Phase.EVALUATION)
    assert found["data"] >= 0.02
    assert found["forward"] >= 0.02


def test_a_save_between_two_calls_stays_a_save():
    found = seconds_of(Phase.EVALUATION, Phase.CHECKPOINT, Phase.EVALUATION)
    assert found["checkpoint"] >= 0.02
