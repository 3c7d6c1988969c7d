"""What is said of the modes of calls that are trained: when it changes, and only of those."""

import pytest
import torch
from torch import nn

from holter.rank.readings.modes import is_sensitive
from holter.records import Modes


class Net(nn.Module):
    """Statistics and dropout between two layers."""

    def __init__(self, share: float = 0.1) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.head = (
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(share),
            nn.Linear(8, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.first(x))))


class Loop:
    """Trains a model step by step under the probes."""

    def __init__(self, worn, model: nn.Module) -> None:
        self.worn, self.model = worn, model
        worn.monitor.add_model(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, num: int = 1, *, calls: int = 1) -> None:
        for _ in range(num):
            self.optimizer.zero_grad()
            for _ in range(calls):
                self.model(torch.randn(6, 4)).pow(2).mean().backward()
            self.optimizer.step()

    def said(self) -> list[tuple[int, list[str], bool]]:
        told = self.worn.said(Modes)
        return [(one.step, one.body.evaluating.names, one.body.is_whole) for one in told]


def test_a_model_in_training_says_nothing(worn):
    loop = Loop(worn, Net())
    loop.step(12, calls=2)
    assert [] == loop.said()


def test_evaluation_mode_is_told_when_it_begins_and_when_it_ends(worn):
    loop = Loop(worn, Net())
    loop.step(3)
    loop.model.eval()
    loop.step(3)
    loop.model.train()
    loop.step(3)
    assert [(3, ["drop", "norm"], True), (6, [], False)] == loop.said()


def test_one_module_is_told_by_name(worn):
    loop = Loop(worn, Net())
    loop.model.norm.eval()
    loop.step(3)
    assert [(0, ["norm"], False)] == loop.said()


@pytest.mark.parametrize("has_gradients", [True, False])
def test_an_evaluation_in_the_loop_is_not_trained(worn, has_gradients):
    loop = Loop(worn, Net())
    for _ in range(4):
        loop.model.eval()
        with torch.set_grad_enabled(has_gradients):
            loop.model(torch.randn(6, 4))
        loop.model.train()
        loop.step()
    assert [] == loop.said()


def test_a_model_without_such_modules_says_nothing(worn):
    loop = Loop(worn, nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.0), nn.Linear(8, 2)))
    loop.model.eval()
    loop.step(3)
    assert [] == loop.said()


def test_attention_and_recurrent_layers_hold_their_share_themselves():
    assert is_sensitive(nn.MultiheadAttention(8, 2, dropout=0.1))
    assert is_sensitive(nn.GRU(4, 4, num_layers=2, dropout=0.1))
    assert not is_sensitive(nn.GRU(4, 4))
    assert not is_sensitive(nn.BatchNorm1d(4, track_running_stats=False))
