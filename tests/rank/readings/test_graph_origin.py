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


class Deep(nn.Module):
    """Two checkpointed blocks between an embedding and a head."""

    def __init__(self, bad: str, *, is_reentrant: bool) -> None:
        super().__init__()
        if not is_reentrant:  # The order in which modules are made is not always that in which they are called.
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 8)
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4)) for _ in range(2)
        )
        if is_reentrant:
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 8)
        self.is_reentrant = is_reentrant
        if bad:
            self.get_submodule(bad).register_forward_hook(lambda _module, _args, out: out * torch.nan)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(self.norm(x))


def recomputed(model: nn.Module):
    tokens = torch.tensor([[1, 2], [3, 4]])
    loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    names = {id(p): name for name, p in model.named_parameters()}
    kinds = {name: type(part).__name__ for name, part in model.named_modules()}
    assert graph_origin.find(loss, names, kinds) is None
    assert graph_origin.is_recomputed(loss)
    called = {id(part): name for name, part in model.named_modules()}
    watch = graph_origin.RecomputedForward(loss, names, kinds, called, lambda hook: hook)
    loss.backward()
    return watch.end()


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("bad", [f"blocks.{block}.{part}" for block in (0, 1) for part in range(4)])
def test_what_is_computed_anew_names_its_module(bad, is_reentrant):
    origin = recomputed(Deep(bad, is_reentrant=is_reentrant))
    assert origin is not None
    assert (bad, True, True) == (origin.module, origin.is_input_finite, origin.is_by_graph)
    assert not torch.nn.modules.module._global_forward_hooks, "hooks are gone"


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_healthy_block_that_is_computed_anew_is_not_named(is_reentrant):
    assert recomputed(Deep("", is_reentrant=is_reentrant)) is None
    assert recomputed(Deep("head", is_reentrant=is_reentrant)) is None


class Kept(torch.autograd.Function):
    """A linear layer as an autograd.Function of somebody's own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


@pytest.mark.parametrize("bad", ["up", "down"])
def test_layers_that_are_functions_of_their_own_tell_what_they_were_given(bad, monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: Kept.apply(x, self.weight))
    origin = found(Net(bad))
    assert origin is not None
    assert bad == origin.module
