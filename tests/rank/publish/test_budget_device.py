"""What a device spends on readings is measured by its own events, without waiting, and counts against the budget."""

import fake_cuda
import pytest
import torch
from tests.rank.conftest import Worn
from torch import nn

pytestmark = pytest.mark.device


def test_device_time_of_readings_is_learnt_and_told_to_the_schedule_without_waiting() -> None:
    worn, told = Worn(), []
    schedule = worn.monitor.context.schedule
    observe = schedule.observe
    schedule.observe = lambda **seen: (told.append(seen["device_s"]), observe(**seen))
    model, inputs = nn.Linear(16, 16).cuda(), torch.ones(2, 16, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worn.monitor.add_model(model)

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    fake_cuda.syncs()
    with fake_cuda.delayed(0.001):
        train(4)
    assert [] == fake_cuda.syncs()
    fake_cuda.drain()
    train(1)
    # Each of a reading's operations begins a millisecond later: two kernels at least.
    assert worn.monitor.context.readings.device_s > 0.002
    assert sum(told) == pytest.approx(worn.monitor.context.readings.device_s)


def test_vitals_are_as_rare_as_their_share_of_the_device_demands() -> None:
    worn, spent = Worn(), []
    schedule = worn.monitor._vitals._schedule
    schedule.spend = spent.append
    model, inputs = nn.Linear(16, 16).cuda(), torch.ones(2, 16, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worn.monitor.add_model(model)
    for _ in range(3):
        optimizer.zero_grad()
        with fake_cuda.delayed(0.02):
            model(inputs).square().mean().backward()
            optimizer.step()
        fake_cuda.drain()
    # The last step's readings are told with the next step's.
    assert sum(spent) > 0.5 * worn.monitor.context.readings.vitals_s > 0.1
