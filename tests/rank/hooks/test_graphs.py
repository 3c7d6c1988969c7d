"""A replay of a CUDA graph is progress; nothing is read while one is being captured. The graph here is a stand-in that runs no device."""

import pytest
import torch
from torch import nn

from holter.records import StepDone, Vitals


class Graph:
    """Has the calls of torch.cuda.CUDAGraph."""

    def capture_begin(self, *_: object) -> None:
        Graph.is_capturing = True

    def capture_end(self) -> None:
        Graph.is_capturing = False

    def replay(self) -> str:
        return "replayed"

    is_capturing = False


@pytest.fixture
def graphs(monkeypatch, wear):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Graph.is_capturing)
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: None)
    return wear()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_replayed_step_is_counted_and_beats(graphs):
    model = nn.Linear(4, 1)
    graphs.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    train(model, optimizer)
    graph.capture_end()
    assert ["replayed"] * 5 == [graph.replay() for _ in range(5)]
    assert list(range(7)) == [observation.step for observation in graphs.said(StepDone)]
    assert 7 == graphs.reader.heartbeat().step
    train(model, optimizer)
    assert list(range(8)) == [observation.step for observation in graphs.said(StepDone)]


def test_a_replay_without_a_step_beats_and_counts_none(graphs):
    model = nn.Linear(4, 1)
    graphs.monitor.add_model(model)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    model(torch.ones(2, 4)).sum().backward()
    graph.capture_end()
    before = graphs.reader.heartbeat().at_ns
    graph.replay()
    assert graphs.reader.heartbeat().at_ns > before
    assert 0 == graphs.reader.heartbeat().step
    assert not graphs.said(StepDone)


def test_nothing_is_read_into_a_graph_that_is_being_captured(graphs):
    model = nn.Linear(4, 1)
    graphs.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = []
    readings = graphs.monitor.context.readings
    original = readings.read
    readings.read = lambda name, *args, **kwargs: names.append(name) or original(name, *args, **kwargs)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    train(model, optimizer)
    graph.capture_end()
    assert not names
    assert not graphs.said(Vitals)
    assert [0] == [observation.step for observation in graphs.said(StepDone)]
    train(model, optimizer)
    assert names
