"""A device answers late: nothing is waited for, and a step is told when its readings are in."""

import torch
from torch import nn

from holter.rank.readings.fused_pass import Readings
from holter.records import StepDone
from holter_kernels import Pass


def train(worn, num_steps: int, nan_step: int = -1) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worn.monitor.add_model(model)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).pow(2).mean()
        if step == nan_step:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()


def test_a_late_answer_belongs_to_its_own_step(worn):
    train(worn, 20)
    at_once = [observation.body.gradient_norm for observation in worn.said(StepDone)]
    worn.forget()
    worn.answer_late()
    train(worn, 20)
    late = [observation.body.gradient_norm for observation in worn.said(StepDone)]
    assert at_once[: len(late)] == late
    assert 10 < len(late) < 20


def test_steps_are_told_in_order(worn):
    worn.answer_late()
    train(worn, 30)
    steps = [observation.step for observation in worn.said(StepDone)]
    assert steps == list(range(len(steps)))


def test_a_late_nan_is_told_with_its_step(worn):
    worn.answer_late()
    train(worn, 30, nan_step=10)
    first = next(observation for observation in worn.said(StepDone) if observation.body.nonfinite)
    assert first.step == 10
    assert {"loss", "gradient", "reduced_gradient"} == {entry.where for entry in first.body.nonfinite}


def test_a_reading_that_is_never_answered_does_not_hold_the_steps_back(worn):
    class Mute(Pass):
        def poll(self):
            return None

    worn.monitor.context.readings = Readings(Mute)
    train(worn, 30)
    steps = [observation.step for observation in worn.said(StepDone)]
    assert steps == list(range(30 - 8))
