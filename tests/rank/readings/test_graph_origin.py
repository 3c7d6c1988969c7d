"""The module that made a NaN, read off the graph of a loss."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint

from holter.rank.readings import graph_origin


class Net(nn.Module):
    """An embedding, a block and a head; one of them may make a NaN."""

    def __init__(self, bad: str = "", *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.up, self.norm = nn.Embedding(8, 4), nn.Linear(4, 6), nn.LayerNorm(6)
        self.down, self.head = nn.Linear(6, 4), nn.Linear(4, 8)
        self.is_checkpointed = is_checkpointed
        if bad:
            getattr(self, bad).register_forward_hook(lambda _module, _args, out: out * torch.nan)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(silu(self.up(x))))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.is_checkpointed else self.block(x)
        return self.head(x)


def found(model: nn.Module, loss=None):
    tokens = torch.tensor([[1, 2], [3, 4]])
    out = model(tokens).flatten(0, 1)
    made = loss(out) if loss else cross_entropy(out, tokens.flatten())
    names = {id(p): name for name, p in model.named_parameters()}
    return graph_origin.find(made, names, {name: type(part).__name__ for name, part in model.named_modules()})


@pytest.mark.parametrize("bad", ["embedding", "up", "norm", "down"])
def test_the_module_that_made_it_is_named(bad):
    origin = found(Net(bad))
    assert origin is not None
    assert (bad, True, False, True) == (origin.module, origin.is_input_finite, origin.replayed, origin.is_by_graph)


def test_the_last_layer_is_named_where_the_loss_could_not_have_made_it():
    model = Net()
    model.head.bias.data[0] = torch.inf
    origin = found(model)
    assert origin is not None
    assert "head" == origin.module


def test_what_the_loss_made_is_no_module_s():
    assert found(Net(), loss=lambda out: (out * 0).log().mean() * 0) is None
    assert found(Net()) is None


def test_what_was_packed_away_stays_packed():
    calls = []
    model = Net("up", is_checkpointed=True)
    model.up.register_forward_hook(lambda *_: calls.append(1))
    found(model)
    assert [1] == calls
