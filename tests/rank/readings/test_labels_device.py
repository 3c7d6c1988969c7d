"""Labels go past the model: on a device they are questioned in host memory, where a loader gave them, once the step is known to be bad."""

import math

import fake_cuda
import pytest
import torch
from tests.rank.conftest import Worn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holter.records import StepDone

pytestmark = pytest.mark.device


def test_a_nan_in_the_labels_is_named_though_the_device_tells_of_it_steps_later() -> None:
    worn = Worn()
    model = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worn.monitor.add_model(model)
    labels = torch.ones(24, 1)
    labels[9] = math.nan
    with fake_cuda.delayed(0.001):
        for x, y in DataLoader(TensorDataset(torch.ones(24, 4), labels), batch_size=4):
            optimizer.zero_grad()
            (model(x.cuda()) - y.cuda()).square().mean().backward()
            optimizer.step()
    fake_cuda.drain()
    worn.monitor.context.readings.poll()
    worn.monitor.steps._reporter.tell_ready()
    bad = [said for said in worn.said(StepDone) if said.body.nonfinite]
    assert 2 == bad[0].step
    # Not taken for a mask, which healthy steps have too: nobody knew yet that this one was none.
    assert ("input", "batch[1]", 0) in {
        (entry.where, entry.name, entry.healthy_steps) for entry in bad[0].body.nonfinite
    }
    assert not worn.monitor.context.guard.failures
