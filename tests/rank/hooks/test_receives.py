"""Whose making an input is that a rank received in the step under way."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holter.records import StepDone

pytestmark = pytest.mark.usefixtures("swept", "gloo")


def senders(worn) -> list[int]:
    done = worn.said(StepDone)[-1].body
    return [entry.received_from for entry in done.nonfinite if entry.where == "input"]


def test_a_batch_that_was_received_names_its_sender_in_that_step_alone(wear):
    worn, model = wear(world_size=1), nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.full((2, 4), torch.nan)

    def step() -> list[int]:
        model(batch.detach().requires_grad_()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return senders(worn)

    dist.P2POp(dist.irecv, batch, 0)
    assert [0] == step()
    assert [-1] == step(), "it lies where it lay, and nobody has sent it"
    dist.P2POp(dist.isend, batch, 0)
    assert [-1] == step(), "what is sent is not received"
