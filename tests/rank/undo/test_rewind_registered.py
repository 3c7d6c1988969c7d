"""What a script counts of a step that is undone is not counted; what it counted of those before stays."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from holter.rank.framework import Framework
from holter.rank.undo.rewind import MAX_ENTRIES, RegisteredObjects


class Progress:
    """As scripts register it with their framework."""

    def __init__(self) -> None:
        self.batches = self.steps = 0
        self.mean = 0.0
        self.recent: deque[float] = deque(maxlen=2)
        self.named = {"last": ""}
        self.weights = torch.zeros(3)
        self.long = list(range(MAX_ENTRIES + 1))


def kept(progress: object) -> RegisteredObjects:
    found = RegisteredObjects()
    found.find = lambda: [progress]
    return found


def test_plain_values_come_back_and_all_else_is_left_alone():
    progress = Progress()
    registered = kept(progress)
    tally = registered.take()
    progress.batches, progress.mean, progress.new = 7, 0.5, 1
    progress.recent.append(1.0)
    progress.named["last"] = "cat.png"
    progress.weights += 1
    progress.long.append(0)
    registered.put(tally)
    assert (0, 0.0, deque(), {"last": ""}) == (progress.batches, progress.mean, progress.recent, progress.named)
    assert (1, 3.0, MAX_ENTRIES + 2) == (progress.new, progress.weights.sum().item(), len(progress.long))


@pytest.mark.parametrize("make", [lambda: 3, object, lambda: nn.Linear(2, 2), lambda: deque([1])])
def test_what_has_no_such_attributes_is_no_trouble(make):
    thing = make()
    registered, shown = kept(thing), repr(thing)
    tally = registered.take()
    registered.put(tally)
    assert shown == repr(thing)
    assert tally == registered.take()


class Registering(Framework):
    """One that takes objects to be saved with the state."""

    def __init__(self, *taken: Any) -> None:
        self.taken = taken

    def registered(self, optimizer: Any) -> Any:  # noqa: ARG002
        return lambda: self.taken


@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("is_counted_first", [True, False], ids=["before-the-batch-is-used", "after"])
def test_micro_batches_of_an_undone_step_are_not_counted(worn, num_micro, is_counted_first):
    """The loop is stopped after the backward pass of its last micro-batch."""
    progress, model = Progress(), nn.Linear(4, 1)
    worn.monitor.context.frameworks.known = [Registering(progress)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=1))
    for step in range(3):
        for micro in range(num_micro):
            batch = next(batches)
            progress.batches += is_counted_first
            model(batch).sum().backward()
            if step == 2 and micro == num_micro - 1:
                break
            progress.batches += not is_counted_first
        else:
            optimizer.step()
            progress.steps += 1
    worn.monitor.context.undo.rewind.restore(2)
    assert (2 * num_micro, 2) == (progress.batches, progress.steps)
