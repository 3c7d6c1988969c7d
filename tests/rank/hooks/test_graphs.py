"""A replay of a CUDA graph is progress; nothing is read while one is being captured."""

import fake_cuda
import pytest
import torch
from tests.rank.conftest import Worn
from torch import nn

from holter.records import StepDone, Vitals

pytestmark = pytest.mark.device


class Agent:
    """Wants every step to be finite."""

    def is_wanted(self) -> bool:
        return True

    def is_due(self, _step: int) -> bool:
        return False

    def hold(self, step: int, why: str, num_skipped: int = 0) -> None:
        raise AssertionError(step, why, num_skipped)


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


def captured(*, is_worn: bool, how: dict[str, bool]) -> tuple[list[str], list[torch.Tensor], Worn | None]:
    """The names of all operations that a step puts into a graph, after steps that were not captured; and the weights after some replays."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True, **how)
    inputs = torch.randn(8, 4, device="cuda")
    worn = Worn(guard_wait_s=60.0, snapshot_every=1, snapshot_bytes=1 << 20) if is_worn else None
    if worn is not None:
        worn.monitor.add_model(model)
        worn.monitor.context.hold.agent = Agent()

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), fake_cuda.launches() as launched:
        step()
    for _ in range(3):
        graph.replay()
    fake_cuda.drain()
    return launched, [p.detach().cpu() for p in model.parameters()], worn


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}])
def test_where_steps_are_held_a_capture_holds_what_the_script_captures_and_nothing_else(how) -> None:
    expected, weights, _ = captured(is_worn=False, how=how)
    launched, found, worn = captured(is_worn=True, how=how)
    assert expected == launched
    assert all(map(torch.equal, weights, found))
    assert {} == worn.monitor.context.guard.failures


def test_a_model_that_is_followed_can_be_made_a_graph_and_is_followed_on() -> None:
    loop = Loop()
    loop.train()
    graphed = torch.cuda.make_graphed_callables(loop.model, (torch.zeros(2, 4, device="cuda"),))
    assert graphed is loop.model
    loop.train()
    assert [0, 1] == loop.steps()
    assert loop.model._forward_pre_hooks
    assert {} == loop.worn.monitor.context.guard.failures


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
