"""A replay of a CUDA graph is progress; nothing is read while one is being captured."""

import fake_cuda
import pytest
import torch
from tests.rank.conftest import Worn
from torch import nn

from holter.records import StepDone, Vitals

pytestmark = pytest.mark.device


class Loop:
    """A model on the device whose steps can be captured."""

    def __init__(self) -> None:
        self.worn = Worn()
        self.model = nn.Linear(4, 1).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.inputs = torch.ones(2, 4, device="cuda")
        self.worn.monitor.add_model(self.model)

    def backward(self) -> None:
        self.model(self.inputs).sum().backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()

    def steps(self) -> list[int]:
        fake_cuda.drain()
        self.worn.monitor.context.readings.poll()
        self.worn.monitor.steps._reporter.tell_ready()
        return [observation.step for observation in self.worn.said(StepDone)]


def test_a_replayed_step_is_counted_and_beats() -> None:
    loop, graph = Loop(), torch.cuda.CUDAGraph()
    loop.train()
    fake_cuda.drain()
    with torch.cuda.graph(graph):
        loop.train()
    for _ in range(5):
        graph.replay()
    assert list(range(7)) == loop.steps()
    assert 7 == loop.worn.reader.heartbeat().step
    loop.train()
    assert list(range(8)) == loop.steps()
    assert not loop.worn.monitor.context.guard.failures


def test_a_replay_without_a_step_beats_and_counts_none() -> None:
    loop, graph = Loop(), torch.cuda.CUDAGraph()
    loop.backward()
    fake_cuda.drain()
    with torch.cuda.graph(graph):
        loop.backward()
    before = loop.worn.reader.heartbeat().at_ns
    graph.replay()
    assert loop.worn.reader.heartbeat().at_ns > before
    assert 0 == loop.worn.reader.heartbeat().step
    assert [] == loop.steps()


def test_nothing_is_read_into_a_graph_that_is_being_captured() -> None:
    loop, graph, names = Loop(), torch.cuda.CUDAGraph(), []
    loop.train()
    fake_cuda.drain()
    loop.worn.forget()
    readings = loop.worn.monitor.context.readings
    original = readings.read
    readings.read = lambda name, *args, **kwargs: names.append(name) or original(name, *args, **kwargs)
    with torch.cuda.graph(graph), fake_cuda.launches() as launched:
        loop.train()
    assert [] == names == [name for name in launched if name.startswith("triton")]
    assert not loop.worn.said(Vitals)
    loop.train()
    assert names
