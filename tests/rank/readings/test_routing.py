"""What routers and experts of a real model show."""

import io
import sys

import pytest
import torch
from torch import nn

from holter.rank.readings.routing import FIRST_STEP
from holter.records import Routing

WIDTH, NUM = 8, 4


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Other tests of this process may have used torch.compile, which keeps looks away."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters.clear()


class Choosing(nn.Module):
    """A router that gives weights and indices, as several libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, NUM)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x).softmax(-1).topk(2)


class Mixture(nn.Module):
    """Experts behind a router; a capacity, and a balancing term that may be left out of the loss."""

    def __init__(self, router: nn.Module | None = None, capacity: int = 1000) -> None:
        super().__init__()
        self.gate = router or nn.Linear(WIDTH, NUM)
        self.top_k = 2
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM))
        self.capacity = capacity
        self.aux_loss = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.gate(x)
        weights, chosen = found if isinstance(found, tuple) else found.softmax(-1).topk(2)
        self.aux_loss = weights.mean()
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).any(-1).nonzero().flatten()[: self.capacity]
            if len(rows):
                x = x.index_add(0, rows, expert(x[rows]))
        return x


class Gated(nn.Module):
    """A gated layer: its gate is no router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x).sigmoid() * self.up(x)


def train(worn, layer: nn.Module, num_steps: int = 12, weight: float = 0.0) -> list[Routing]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, WIDTH)).pow(2).mean()
        (loss + weight * layer.aux_loss if weight else loss).backward()
        optimizer.step()
    assert not any(module._forward_hooks for module in layer.modules())
    return [observation.body for observation in worn.said(Routing)]


@pytest.mark.parametrize("router", [None, Choosing()], ids=["logits", "indices"])
def test_choices_and_what_arrives_are_counted_now_and_then(worn, router):
    first, second, third = train(worn, Mixture(router))
    assert ("1", NUM, 2, 16) == (first.module, first.num_experts, first.top_k, first.num_tokens)
    assert 32 == sum(first.counts)
    assert first.counts == first.received
    assert 32 == sum(second.counts) == sum(third.counts)


def test_what_a_capacity_cuts_does_not_arrive(worn):
    for told in train(worn, Mixture(capacity=3)):
        assert [min(count, 3) for count in told.counts] == told.received


def test_a_term_that_is_not_added_is_told_from_one_that_is(worn):
    told = train(worn, Mixture(), weight=0.0)
    assert [("aux_loss", False)] * 3 == [(one.term, one.is_term_learning) for one in told]
    told = train(worn, Mixture(), weight=0.1)
    assert [("aux_loss", True)] == list({(one.term, one.is_term_learning) for one in told[3:]})


def test_a_term_can_be_saved_without_a_warning(worn):
    layer = Mixture()
    (told,) = train(worn, layer, num_steps=FIRST_STEP + 1)
    assert "aux_loss" == told.term
    torch.save(layer.aux_loss, io.BytesIO())  # would warn of a hook


def test_the_gate_of_a_gated_layer_is_no_router(worn):
    assert [] == train(worn, Gated())


class Shared(nn.Module):
    """Four experts in all, two of them on this rank, each given all tokens that came here."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        return sum(torch.where((chosen == place)[:, None], expert(x), 0.0) for place, expert in enumerate(self.experts))


def test_a_router_of_more_experts_than_a_rank_holds_is_counted_by_its_outputs(worn):
    first = train(worn, Shared())[0]
    assert (NUM, 16, NUM) == (first.num_experts, sum(first.counts), len(first.counts))
