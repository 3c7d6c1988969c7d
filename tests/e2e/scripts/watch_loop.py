"""A hand-written loop that asks for holter by itself, in the way that the argument says."""

import sys

import torch
from torch import nn

import holter


def train(model: nn.Module, optimizer: torch.optim.Optimizer, backward) -> None:
    """A few steps."""
    for _ in range(30):
        optimizer.zero_grad()
        backward(model(torch.randn(4, 8)).pow(2).mean())
        optimizer.step()


model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if sys.argv[1] == "accelerator":
    from accelerate import Accelerator

    accelerator = holter.watch(Accelerator())
    assert isinstance(accelerator, Accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(model, optimizer, accelerator.backward)
    assert holter.watch(accelerator) is accelerator
    accelerator.end_training()
else:
    watch = holter.watch(model, optimizer)
    holter.watch(model, optimizer)
    train(model, optimizer, torch.Tensor.backward)
    watch.log(kl=torch.tensor(0.5), loss_terms={"a": 1.0}, odd=object())
